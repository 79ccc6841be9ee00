"""A trainer on Ray: a driver and two workers (actors), in prime-rl's layout A. Runs with the Python that has ray.

With RAY_ADDRESS it joins that cluster, else it brings its own up. Each start writes one line to ``starts.jsonl``: what
of Ray lived in this run's temporary directory before it did anything, and its workers' process ids.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.support.checkpoints import (
    broadcast_operations,
    dcp_operations,
    finish,
    orchestrator_operations,
    write_rollouts,
)


def living(temp_dir: str) -> dict[int, str]:
    """Processes with this directory in their command line; actors show only their title and are found by parent."""
    found: dict[int, str] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if entry.name.isdigit() and state not in "ZX" and line:
            parents[int(entry.name)] = int(parent)
            if temp_dir in line and "driver.py" not in line and "podwatch" not in line:
                found[int(entry.name)] = line[:100]
    for pid, parent in parents.items():
        if parent in found and pid not in found:
            found[pid] = f"child of {parent}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--ckpt.interval", dest="interval", type=int, default=5)
    parser.add_argument("--ckpt.resume-step", dest="resume", type=int)
    args = parser.parse_args()
    own = "RAY_ADDRESS" not in os.environ
    before = living(args.temp_dir)
    import ray

    if own:
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=args.temp_dir,
                 log_to_driver=False)  # fmt: skip
    else:
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)

    @ray.remote(num_cpus=1)
    class Worker:
        def pid(self) -> int:
            return os.getpid()

        def step(self, number: int) -> int:
            return number

    workers = [Worker.remote() for _ in range(2)]
    pids = ray.get([worker.pid.remote() for worker in workers])
    start = {
        "driver": os.getpid(),
        "workers": pids,
        "step": args.resume,
        "before": before,
        "ray": living(args.temp_dir),
    }
    with (args.control / "starts.jsonl").open("a") as out:
        out.write(json.dumps(start) + "\n")
    run = args.output_dir / "run_default"
    step = args.resume or 0
    while True:
        finish(broadcast_operations(run / "broadcasts" / f"step_{step}", 512))
        if step and step % args.interval == 0 and step != args.resume:
            finish(orchestrator_operations(run / "checkpoints" / f"step_{step}" / "orchestrator", step, "A"))
            finish(dcp_operations(args.output_dir / "checkpoints" / f"step_{step}" / "trainer", 512))
        assert ray.get([worker.step.remote(step) for worker in workers]) == [step, step]
        write_rollouts(args.output_dir, step)
        time.sleep(0.2)
        print(f"{time.strftime('%H:%M:%S')} SUCCESS Step {step} | Time: 0.2s | Loss: 0.5 | Reward: 0.1", flush=True)
        step += 1


if __name__ == "__main__":
    main()
