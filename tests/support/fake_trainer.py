"""A trainer in prime-rl's layout A with nothing to train: steps, STABLE markers, checkpoint files, an engine child.

Standard library only, so that it starts fast. It misbehaves when told to, by ``<control>/orders.json``, which is read
at every step: ``{"exit": 1}`` (with ``"at": N`` only from step N on), ``{"hang": true}``, ``{"finish": true}`` (finish
line now), ``{"step_seconds": 0.5}``, ``{"wait": true}`` (it stands between two steps until there is another order, and
tells so by ``<control>/waits``), ``{"say": ["line"]}`` (printed at each step, before an exit). An order with
``"once": true`` is removed before it is carried out. At its start it obeys ``{"begin": N}`` (it begins at this step,
whatever its arguments say), ``{"early": ["line"]}`` (it prints that and ends before it loads) and
``{"fail_load": [N], "say": ["line"]}`` (it prints that and ends when it has loaded one of these steps; 0 is a start
without a checkpoint).

Each trainer and each engine takes a lock for its whole life. One that finds it taken writes to ``<control>/double``:
two trainers were alive at once, however short (promise 4). The trainer notes what it makes below its output directory
in ``<control>/made-by-trainer`` (promise 8).
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.checkpoints import (
    broadcast_operations,
    dcp_operations,
    finish,
    orchestrator_operations,
    write_rollouts,
)
from tests.support.creations import Creations


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--max-steps", type=int, default=1_000_000)
    parser.add_argument("--ckpt.interval", dest="interval", type=int, default=5)
    parser.add_argument("--no-saves", action="store_true", help="never save, whatever the interval says")
    parser.add_argument("--ckpt.resume-step", dest="resume", type=int)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--start-seconds", type=float, default=0.0)
    parser.add_argument("--no-step-lines", action="store_true", help="print nothing at a step")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--broadcast-size", type=int, help="as --size")
    parser.add_argument("--second-file-until", type=int, default=0, help="saves below this step have a file more")
    parser.add_argument("--save-at-sigterm", type=float, help="save within so many seconds of SIGTERM, then end")
    parser.add_argument("--wandb.api-key", dest="wandb_key", help="not used: a secret in a command line")
    parser.add_argument("--x-token", dest="token", help="the same")
    parser.add_argument("overrides", nargs="*", help="@ FILE.toml: its ckpt.resume_step; ++key=value is not used")
    parser.add_argument("--trainer.wandb.id", dest="wandb_trainer")
    parser.add_argument("--orchestrator.wandb.id", dest="wandb_orchestrator")
    args = parser.parse_args(argv)
    for name in args.overrides if args.resume is None else ():
        if name.endswith(".toml") and Path(name).exists():
            args.resume = tomllib.loads(Path(name).read_text()).get("ckpt", {}).get("resume_step")
    return args


def alone(control: Path, what: str) -> int:
    """Hold the lock of ``what`` until this process ends; tell if somebody else holds it."""
    lock = os.open(control / f"{what}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with (control / "double").open("a") as out:
            out.write(f"{what} {os.getpid()} {time.time()}\n")
    (control / f"{what}.pid").write_text(str(os.getpid()))
    return lock


def engine(control: Path, parent_lock: int) -> NoReturn:
    """The process that would hold the GPU memory. It outlives a trainer that is killed, as vLLM's does."""
    os.close(parent_lock)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Path("/proc/self/comm").write_text("VLLM::EngineCore")
    alone(control, "engine")
    while True:
        time.sleep(60)


class Orders:
    def __init__(self, control: Path) -> None:
        self._path = control / "orders.json"

    def at_start(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def now(self, step: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        if step < found.get("at", 0):
            return {}
        if found.get("once"):
            self._path.unlink(missing_ok=True)
        return found


def main() -> int:
    args = parse(sys.argv[1:])
    control, output = args.control, args.output_dir
    Creations(output.absolute(), control / "made-by-trainer")
    orders = Orders(control)
    with (control / "starts.jsonl").open("a") as out:  # first: whoever sees our pid finds the start listed
        out.write(json.dumps({"pid": os.getpid(), "step": args.resume, "argv": sys.argv[1:]}) + "\n")
    wanted = orders.at_start()
    if "early" in wanted:
        print(*wanted["early"], sep="\n", flush=True)
        return 1
    lock = alone(control, "trainer")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    own = output / "run_default"
    if args.resume is not None:
        needed = output / "checkpoints" / f"step_{args.resume}" / "trainer" / ".metadata"
        if not needed.exists():
            raise FileNotFoundError(f"Checkpoint not found at {needed.parent}")
    if os.fork() == 0:
        engine(control, lock)
    time.sleep(args.start_seconds)
    if (args.resume or 0) in wanted.get("fail_load", ()):
        print(*wanted.get("say", ()), sep="\n", flush=True)
        return 1

    def save(step: int) -> None:
        if args.no_saves:
            return
        finish(orchestrator_operations(own / "checkpoints" / f"step_{step}" / "orchestrator", step, "A"))
        own_part = output / "checkpoints" / f"step_{step}"
        if step < args.second_file_until:
            own_part.mkdir(parents=True, exist_ok=True)
            (own_part / "second.bin").write_bytes(os.urandom(1000))
        finish(dcp_operations(own_part / "trainer", args.size))

    step = wanted.get("begin", args.resume or 0)

    def save_and_end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(args.save_at_sigterm)
        finish(broadcast_operations(own / "broadcasts" / f"step_{step}", args.broadcast_size or args.size))
        save(step)
        os._exit(143)

    if args.save_at_sigterm is not None:
        signal.signal(signal.SIGTERM, save_and_end)
    while step < args.max_steps:
        while (order := orders.now(step)).get("wait"):
            (control / "waits").touch()
            time.sleep(0.02)
        if order.get("hang"):
            while True:
                time.sleep(60)
        for line in order.get("say", ()):
            print(line, flush=True)
        if "exit" in order:
            return int(order["exit"])
        if order.get("finish"):
            break
        finish(broadcast_operations(own / "broadcasts" / f"step_{step}", args.broadcast_size or args.size))
        if step and step % args.interval == 0 and step != args.resume:
            save(step)
        write_rollouts(output, step)
        time.sleep(order.get("step_seconds", args.step_seconds))
        if not args.no_step_lines:
            print(f"{time.strftime('%H:%M:%S')} SUCCESS Step {step} | Time: 0.1s | Loss: 0.5 | Reward: 0.1", flush=True)
        step += 1
    finish(broadcast_operations(own / "broadcasts" / f"step_{step}", args.broadcast_size or args.size))
    save(step)
    print("Orchestrator finished.\nRL trainer finished!", flush=True)
    engine_pid = int((control / "engine.pid").read_text())
    os.kill(engine_pid, signal.SIGTERM)
    os.waitpid(engine_pid, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
