"""A launcher with an engine that ends at once at SIGINT or SIGTERM, and a trainer that takes its time, as FSDP does.

    interruptible.py CONTROL OUTPUT_DIR TEARDOWN_SECONDS

Standard library only. It shows its processes by ``<control>/{launcher,engine,trainer}.pid``, makes a step every 0.1 s
and holds a file of a checkpoint open for writing. The launcher passes SIGINT and SIGTERM on, reports them in its
log as Python does, waits for its children and ends by the signal it received. What it makes in OUTPUT_DIR is noted in
``<control>/made-by-trainer``.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.creations import Creations


def named(control: Path, what: str, comm: str) -> None:
    Path("/proc/self/comm").write_text(comm)
    (control / f"{what}.pid").write_text(str(os.getpid()))


def engine(control: Path) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    named(control, "engine", "VLLM::EngineCore")
    while True:
        time.sleep(60)


def trainer(control: Path, output: Path, teardown: float) -> NoReturn:
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _frame: asked.append(n))
    named(control, "trainer", "PRIME-RL::Train")
    shard = output / "checkpoints" / "step_0" / "trainer" / "__0_0.distcp"
    shard.parent.mkdir(parents=True, exist_ok=True)
    with shard.open("w"):
        step = 0
        while not asked:
            time.sleep(0.1)
            step += 1
            print(f"{time.strftime('%H:%M:%S')} SUCCESS Step {step} | Time: 0.1s | Loss: 0.5", flush=True)
        time.sleep(teardown)
    os._exit(130)


def main() -> None:
    control, output, teardown = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    Creations(output, control / "made-by-trainer")
    with (control / "starts.jsonl").open("a") as out:
        out.write(f'{{"pid": {os.getpid()}}}\n')
    asked: list[int] = []
    children = {}
    for what in (lambda: engine(control), lambda: trainer(control, output, teardown)):
        child = os.fork()
        if child == 0:
            what()
        children[child] = what
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _frame: asked.append(n))
    named(control, "launcher", "rl")
    while not asked:
        time.sleep(0.05)
    print("Traceback (most recent call last):\nKeyboardInterrupt", flush=True)
    for child in children:
        os.kill(child, asked[0])
    for child in children:
        os.waitpid(child, 0)
    signal.signal(asked[0], signal.SIG_DFL)
    os.kill(os.getpid(), asked[0])


if __name__ == "__main__":
    main()
