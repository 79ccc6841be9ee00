"""One rescan of 1,000 step directories with 100 files each when nothing changed, and the memory it takes to know them.

    python benchmarks/rescan.py [--steps 1000] [--files 100]

The peer is a plain walk with ``os.scandir`` and a stat of every file: what a rescan costs that starts from nothing.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, memory_mib, parser, percentile, spread
from podwatch.checkpoints.catalogue import Catalogue
from podwatch.checkpoints.layouts.prime_rl import PrimeRLLayout
from podwatch.system.clock import SystemClock
from tests.support.checkpoints import dcp_files, safetensors_bytes, torch_zip_bytes

CPU_LIMIT_MS, MEMORY_LIMIT_MIB = 50.0, 5.0
ROUNDS = 40


def write(out: Path, steps: int, files: int) -> None:
    """Layout A: shards and index, the orchestrator's half, and a broadcast that has the rest of the files."""
    trainer = dcp_files(size=256, ranks=8)
    progress, tensors = torch_zip_bytes({"progress": {"step": 1}}), safetensors_bytes({"w": 4})
    broadcast = {f"model-{n:05}.safetensors": tensors for n in range(files - len(trainer) - 2)} | {"STABLE": b""}
    for step in range(steps):
        name = f"step_{step}"
        parts = {
            out / "run_default" / "checkpoints" / name / "orchestrator": {"progress.pt": progress},
            out / "run_default" / "broadcasts" / name: broadcast,
            out / "checkpoints" / name / "trainer": trainer,
        }
        for directory, content in parts.items():
            directory.mkdir(parents=True)
            for file, data in content.items():
                (directory / file).write_bytes(data)


def walk(path: str) -> int:
    count = 0
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                count += walk(entry.path)
            else:
                entry.stat(follow_symlinks=False)
                count += 1
    return count


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--files", type=int, default=100)
    args = options.parse_args()
    steps = 200 if args.quick else args.steps
    figures = Figures(f"rescan of {steps} steps x {args.files} files, nothing changed")
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "outputs"
        write(out, steps, args.files)
        began = time.process_time()
        count = walk(directory)
        plain = time.process_time() - began
        catalogue = Catalogue(PrimeRLLayout(out), SystemClock(), settle=0.0, settle_weak=0.0)
        before = memory_mib()
        began = time.process_time()
        for _ in range(3):
            catalogue.rescan()
        complete = sum(s.complete for s in catalogue.sets)
        figures.line(f"first looks: {time.process_time() - began:.2f} s CPU; {complete} of {steps} sets complete")
        taken = []
        for _ in range(ROUNDS):
            began = time.process_time()
            catalogue.rescan()
            taken.append(time.process_time() - began)
        growth, peak = memory_mib() - before, memory_mib(field="VmHWM") - before
        figures.line(f"CPU: {spread(taken, 'ms', 1000)}")
        figures.line(f"plain walk of {count} files: {plain * 1000:.0f} ms CPU")
        figures.line(f"a rescan takes {percentile(taken, 0.5) / plain:.2f} of the plain walk")
        figures.at_most("CPU of a rescan, p95", percentile(taken, 0.95) * 1000, CPU_LIMIT_MS, "ms")
        figures.at_most("memory kept", growth, MEMORY_LIMIT_MIB, "MiB")
        figures.line(f"peak above the start: {peak:.1f} MiB")
    return figures.code if complete == steps else 1


if __name__ == "__main__":
    sys.exit(main())
