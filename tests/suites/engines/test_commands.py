"""The command lines of the examples, run for real: podwatch as the process that each engine would start, and a small
trainer in place of `uv`. Store, image paths and engine are this machine's; every other word is the example's."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import own_times
from tests.support.rig import end_all, naming

yaml = pytest.importorskip("yaml", reason="needs the validators: make test-engines")
ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "engines"
STEPS = 12
# `uv run rl @ config.toml --ckpt ...`: the small trainer gets what podwatch added.
UV = f"""#!/bin/sh
here=$(dirname "$(dirname "$0")")
shift 5
[ "$1" != --output-dir ] || shift 2
exec {sys.executable} -S {ROOT}/tests/support/fake_trainer.py --output-dir "$(cat "$here/output")" --control "$here" \\
    --max-steps "$(cat "$here/steps")" --ckpt.interval 4 "$@"
"""
QUICK = {
    "PODWATCH_TRAINER__STOP_GRACE": "2s", "PODWATCH_TRAINER__SAVE_GRACE": "2s", "PODWATCH_HTTP__PORT": "0",
    "NO_COLOR": "1",
}  # fmt: skip
TIMES = """
[times]
"checkpoints.rescan" = "0.3s"
"checkpoints.settle" = "0.2s"
"sync.claim_wait" = "1s"
"recovery.backoff_min" = "0.1s"
"recovery.backoff_max" = "0.5s"
"""


class Machine:
    """``/app`` and ``/data`` of the examples, below a directory of the test's own."""

    def __init__(self, root: Path, store: Path) -> None:
        self.root, self.store = root, store
        self.app = root / "app"
        self.app.mkdir(parents=True)
        self.steps(STEPS)
        (self.app / "config.toml").write_text("")
        (root / "output").write_text(str(self.app / "outputs"))
        (root / "bin").mkdir()
        (root / "bin" / "uv").write_text(UV)
        (root / "bin" / "uv").chmod(0o755)
        self._started: list[subprocess.Popen[bytes]] = []

    def steps(self, number: int) -> None:
        (self.root / "steps").write_text(str(number))

    def here(self, word: str) -> str:
        """A word of an example, for this machine."""
        for there, own in (
            ("b2://my-bucket", f"file://{self.store}"),
            ("/app", self.app),
            ("/data", self.root / "data"),
        ):
            word = word.replace(there, str(own))
        return word

    def start(self, *command: str, **environ: str) -> "subprocess.Popen[bytes]":
        path = f"{self.root / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(self.root), "PODWATCH_RUNTIME_DIR": str(self.root / "runtime"),
               "PODWATCH_STATE_DIR": str(self.root / "state"), "PAUSE": "0", **QUICK,
               **own_times.write(TIMES, self.root / "test-times.toml"), **environ}  # fmt: skip
        with self.log.open("ab") as log:
            self._started.append(
                subprocess.Popen(command, cwd=self.app, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True)
            )  # fmt: skip
        return self._started[-1]

    @property
    def log(self) -> Path:
        return self.root / "log"

    def ends(self, process: "subprocess.Popen[bytes]") -> int:
        """Its code; nothing of it is left at that moment."""
        try:
            code = process.wait(120)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end\n{self.said()}") from None
        assert naming(self.root) == [], self.said()
        return code

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def stored(self) -> list[Path]:
        return list(self.store.rglob("latest.json"))

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        end_all(lambda: naming(self.root))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    store = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="podwatch-engines-"))  # podwatch wants another file system
    made = Machine(tmp_path, store)
    yield made
    made.close()
    shutil.rmtree(store)


def document(name: str) -> dict[str, Any]:
    found = [d for d in yaml.safe_load_all((EXAMPLES / name).read_text()) if d.get("kind") in (None, "Job")]
    return dict(found[0])


def argv(name: str) -> Sequence[str]:
    """What the engine executes, as its example says it."""
    example = document(name)
    if name.startswith("kubernetes"):
        return list(example["spec"]["template"]["spec"]["containers"][0]["command"])
    if name.startswith("compose"):
        service = example["services"]["train"]
        return [*service["entrypoint"], *service["command"]]
    return ["bash", "-i", "-c", " && ".join(example["commands"]) if "commands" in example else example["run"]]


@pytest.mark.parametrize(
    "name", ["kubernetes-job.yaml", "kubernetes-job-pvc.yaml", "compose.yaml", "dstack.yml", "skypilot.yaml"]
)
def test_the_command_of_an_example_trains_and_ends_with_0(machine: Machine, name: str) -> None:
    if "pvc" in name:
        (machine.root / "output").write_text(str(machine.root / "data" / "outputs"))
    process = machine.start(*map(machine.here, argv(name)))
    assert machine.ends(process) == 0, machine.said()
    assert len(machine.stored()) == 1, machine.said()


def loop(machine: Machine) -> "subprocess.Popen[bytes]":
    """As the first lines of loop.sh say that it is started."""
    line = next(x for x in (EXAMPLES / "loop.sh").read_text().splitlines() if "sh loop.sh" in x)
    words = shlex.split(line.partition("sh loop.sh ")[2], comments=True)
    return machine.start("sh", str(EXAMPLES / "loop.sh"), *map(machine.here, words))


def test_the_loop_ends_with_a_finished_run(machine: Machine) -> None:
    assert machine.ends(loop(machine)) == 0, machine.said()
    assert len(machine.stored()) == 1


def test_the_loop_ends_with_a_typo(machine: Machine) -> None:
    (machine.root / "steps").write_text("twelve")  # argparse: invalid int value
    assert machine.ends(loop(machine)) == 65, machine.said()


def test_a_signal_to_the_loop_ends_training_and_the_next_one_continues(machine: Machine) -> None:
    machine.steps(100_000)
    process = loop(machine)
    end = time.monotonic() + 120
    while not machine.stored():
        assert time.monotonic() < end, machine.said()
        time.sleep(0.1)
    process.terminate()
    assert machine.ends(process) == 86, machine.said()
    machine.steps(STEPS)
    shutil.rmtree(machine.app / "outputs")
    (newest,) = machine.stored()
    reached = newest.read_text()
    machine.steps(100_000)
    process = loop(machine)
    while newest.read_text() == reached:
        assert time.monotonic() < end + 120, machine.said()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert machine.ends(process) == 86, machine.said()
    starts = (machine.root / "starts.jsonl").read_text().splitlines()
    assert len(starts) == 2, "one start each"
