"""From verdict to new trainer process, and beside it what systemd and supervisord do with the same process tree.

    python benchmarks/recovery.py [--recoveries 100] [--peers 20]

A real podwatch with its supervisor, a trainer whose engine outlives it, and the NVML stand-in, all at default rhythms.
The parts are named. The peers restart the same tree after the same kill: systemd where this is root and has
systemd-nspawn, supervisord where it can be installed (a venv of its own, .venv-peers).
"""

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import ROOT, Figures, parser, percentile, spread
from benchmarks.measuring.restarting import PARTS, Peer, podwatch_recoveries, supervisord_restarts, systemd_restarts
from tests.suites.systemd.machine import MISSING
from tests.support.nvml import NoCompiler, build_nvml

LIMIT_SECONDS = 5.0
NOT_DONE = "notices exits only; starts at once and from the first step, without a look at GPUs, ports or checkpoints"


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--recoveries", type=int, default=100)
    options.add_argument("--peers", type=int, default=20, help="restarts by each peer")
    args = options.parse_args()
    recoveries, restarts = (10, 5) if args.quick else (args.recoveries, args.peers)
    figures = Figures("recovery: verdict to new process")
    with tempfile.TemporaryDirectory() as directory:
        try:
            library = build_nvml(Path(directory))
        except NoCompiler as missing:
            print(f"  not measured: {missing}")
            return 0
        found = podwatch_recoveries(Path(directory) / "podwatch", library, recoveries, figures.line)
        for part in PARTS:
            figures.line(f"  {part}: {spread([r.parts[part] for r in found], 's')}")
        # The trainer's own exit and the release of its GPUs are not ours: the stop, and nothing that follows it.
        beyond = [r.after_verdict - r.parts["stop"] for r in found]
        figures.line(f"verdict to new process: {spread([r.after_verdict for r in found], 's')} (n = {len(found)})")
        figures.at_most("the same beyond the trainer's own exit, p95", percentile(beyond, 0.95), LIMIT_SECONDS, "s")
        figures.line(
            f"kill to new process, podwatch: {spread([r.after_death for r in found], 's')}; no child left behind"
        )
        if MISSING:
            figures.line(f"systemd Restart=always: not measured here ({MISSING})")
        else:
            peer(figures, "systemd Restart=always", systemd_restarts(restarts))
        if supervisor():
            peer(
                figures, "supervisord autorestart=true", supervisord_restarts(Path(directory) / "supervisord", restarts)
            )
        else:
            figures.line("supervisord: not measured here (it could not be installed)")
    return figures.code


def peer(figures: Figures, name: str, done: Peer) -> None:
    left = f"{done.left} of {len(done.seconds)} restarts beside the old engine" if done.left else "no child left behind"
    figures.line(f"kill to new process, {name}: {spread(done.seconds, 's')}; {left}")
    figures.line(f"  it {NOT_DONE}")


def supervisor() -> bool:
    """Whether supervisord is there, or could be brought."""
    venv = ROOT / ".venv-peers"
    if not (venv / "bin" / "supervisord").exists():
        subprocess.run(["sh", ROOT / "tools" / "make-venv", venv], check=False, capture_output=True, cwd=ROOT)
        install = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "supervisor"]
        subprocess.run(install, check=False, capture_output=True)
    return (venv / "bin" / "supervisord").exists()


if __name__ == "__main__":
    sys.exit(main())
