"""One rescan of 1,000 step directories with 100 files each when nothing changed, and the memory it takes to know them:
prime-rl, and a layout of the common shape (plain DCP) beside 1,000 directories that only look like steps.

    python benchmarks/rescan.py [--steps 1000] [--files 100]

The peer is a plain walk with ``os.scandir`` and a stat of every file: what a rescan costs that starts from nothing.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring import Figures, memory_mib, parser, percentile, spread
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of
from podwatch.system.clock import SystemClock
from tests.drivers.checkpoints import prime_rl_layout
from tests.support.checkpoints import dcp_files, safetensors_bytes, torch_zip_bytes

CPU_LIMIT_MS, MEMORY_LIMIT_MIB = 50.0, 5.0
ROUNDS = 40


def write_prime_rl(out: Path, steps: int, files: int) -> Layout:
    """Layout A: shards and index, the orchestrator's half, and a broadcast that has the rest of the files."""
    trainer = dcp_files(size=256, ranks=8)
    progress, tensors = torch_zip_bytes({"progress": {"step": 1}}), safetensors_bytes({"w": 4})
    broadcast = {f"model-{n:05}.safetensors": tensors for n in range(files - len(trainer) - 2)} | {"STABLE": b""}
    for step in range(steps):
        name = f"step_{step}"
        lay(out / "run_default" / "checkpoints" / name / "orchestrator", {"progress.pt": progress})
        lay(out / "run_default" / "broadcasts" / name, broadcast)
        lay(out / "checkpoints" / name / "trainer", trainer)
    return prime_rl_layout(out)


def write_dcp(out: Path, steps: int, files: int) -> Layout:
    """As many shards as files, less the index; and as many directories that hold no checkpoint."""
    content = dcp_files(size=256, ranks=files - 1)
    for step in range(steps):
        lay(out / f"step_{step}", content)
        lay(out / f"samples-{step}", {"sample.txt": b"text"})
    return layout_of(all_trainers()["dcp"], Site(out))


def lay(directory: Path, content: dict[str, bytes]) -> None:
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


def measure(figures: Figures, name: str, write: Callable[[Path, int, int], Layout], steps: int, files: int) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        layout = write(Path(directory) / "outputs", steps, files)
        began = time.process_time()
        count = walk(directory)
        plain = time.process_time() - began
        catalogue = Catalogue(layout, SystemClock(), settle=0.0, settle_weak=0.0)
        gc.collect()
        before = memory_mib()
        began = time.process_time()
        for _ in range(3):
            catalogue.rescan()
        complete = sum(s.complete for s in catalogue.sets)
        figures.line(f"{name}: first looks {time.process_time() - began:.2f} s CPU; {complete} of {steps} complete")
        taken, listed = [], []
        for _ in range(ROUNDS):
            began = time.process_time()
            catalogue.rescan()
            taken.append(time.process_time() - began)
            began = time.process_time()
            layout.steps()
            listed.append(time.process_time() - began)
        growth, peak = memory_mib() - before, memory_mib(field="VmHWM") - before
        figures.line(f"{name}: CPU {spread(taken, 'ms', 1000)}")
        figures.line(f"{name}: listing the steps anew {spread(listed, 'ms', 1000)}")
        figures.line(f"{name}: plain walk of {count} files {plain * 1000:.0f} ms CPU")
        figures.line(f"{name}: a rescan takes {percentile(taken, 0.5) / plain:.2f} of the plain walk")
        figures.at_most(f"{name}: CPU of a rescan, p95", percentile(taken, 0.95) * 1000, CPU_LIMIT_MS, "ms")
        figures.at_most(f"{name}: memory kept", growth, MEMORY_LIMIT_MIB, "MiB")
        figures.line(f"{name}: peak of the process above the start {peak:.1f} MiB")
    return complete == steps


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--files", type=int, default=100)
    args = options.parse_args()
    steps = 200 if args.quick else args.steps
    figures = Figures(f"rescan of {steps} steps x {args.files} files, nothing changed")
    whole = measure(figures, "prime-rl", write_prime_rl, steps, args.files)
    whole = measure(figures, "dcp", write_dcp, steps, args.files) and whole
    return figures.code if whole else 1


if __name__ == "__main__":
    sys.exit(main())
