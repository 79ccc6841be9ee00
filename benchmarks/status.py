"""The whole process of ``podwatch status`` against Python itself, with a daemon that answers.

    python benchmarks/status.py [--runs 40]

Interleaved with ``python -c pass`` and ``python -c "import click"``, so that all three meet the same machine. The first
round compiles the modules, as an installation does, whatever PYTHONDONTWRITEBYTECODE is here.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import ROOT, Figures, parser, percentile, spread
from benchmarks.measuring.pod import Pod

LIMIT_MS = 150.0
LIMIT_RATIO = 6.0


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--runs", type=int, default=40)
    args = options.parse_args()
    figures = Figures("podwatch status")
    with tempfile.TemporaryDirectory() as directory, Pod(Path(directory)) as pod:
        script = Path(sys.executable).with_name("podwatch")
        status = [str(script), "-c", str(pod.config), "status"]
        commands = {
            "podwatch status": status,
            "python -c pass": [sys.executable, "-c", "pass"],
            "import click": [sys.executable, "-c", "import click"],
        }
        taken: dict[str, list[float]] = {name: [] for name in commands}
        environ = {name: value for name, value in pod.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        for round_ in range((10 if args.quick else args.runs) + 1):
            for name, command in commands.items():
                began = time.perf_counter()
                done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, check=False)
                if round_:  # the first one warms the file cache
                    taken[name].append(time.perf_counter() - began)
                if name == "podwatch status" and b"NOT RUNNING" in done.stdout + done.stderr:
                    raise SystemExit(done.stdout.decode())
    for name, seconds in taken.items():
        figures.line(f"{name}: {spread(seconds, 'ms', 1000)}")
    base = percentile(taken["python -c pass"], 0.5)
    ratio = percentile(taken["podwatch status"], 0.5) / base
    figures.at_most("podwatch status against `python -c pass`, p50", ratio, LIMIT_RATIO, "times")
    figures.at_most("podwatch status, p95", percentile(taken["podwatch status"], 0.95) * 1000, LIMIT_MS, "ms")
    return figures.code


if __name__ == "__main__":
    sys.exit(main())
