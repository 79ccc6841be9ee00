"""One real trainer under a real podwatch: what can be done to it, and what can be asked afterwards."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.suites.trainers.kinds import Trainer
from tests.support import forking
from tests.support.daemon import DaemonProcess
from tests.support.nvml import NvmlWorld
from tests.support.rig import Cards, alive, end_all, members_of

PATIENCE = 60.0
"""Seconds for anything that takes a few on a machine that does nothing else; a start imports torch. Waits take three
times that at most (tests/support/daemon.py)."""
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class GuardedTraining:
    """``store``: a directory on another file system to publish to, or None."""

    def __init__(self, root: Path, library: Path, trainer: Trainer, steps: int, store: Path | None) -> None:
        self.root, self.trainer, self.steps, self.store = root, trainer, steps, store
        self.output, self.control = root / "work" / "outputs", root / "control"
        self.control.mkdir(parents=True)
        self.output.parent.mkdir()
        (self.control / "slow").touch()
        self.run_id = f"trainers-{os.getpid()}"
        self.world = NvmlWorld(root / "world", devices=2)
        self.busy(True)
        self.cards = Cards(self.world, self.control)
        self.daemon = DaemonProcess(root, self._config(), self.world.environment(library))
        self.judged: set[Path] = set()
        """What lay in quarantine when it was looked at last."""
        self.cards.start()

    def _config(self) -> str:
        environ = {**QUIET, "TRAINERS_CONTROL": str(self.control)}
        return f"""
run_id = "{self.run_id}"
state_dir = "{self.root / "state"}"
[trainer]
layout = "{self.trainer.layout}"
output_dir = "{self.output}"
cwd = "{self.output.parent}"
command = {json.dumps(self.trainer.command(self.output, self.steps))}
stop_grace = "2s"
save_grace = "2s"
{self.trainer.settings.replace("{steps}", str(self.steps))}
[trainer.env]
{"".join(f"{key} = {json.dumps(value)}" + chr(10) for key, value in environ.items())}
[gpu]
trainer = [1]
poll = "0.25s"
hold = "1s"
[hang]
floor = "4s"
[checkpoints]
rescan = "0.5s"
settle = "2s"
settle_tracker = "3s"
settle_weak = "4s"
[recovery]
backoff_min = "0.2s"
backoff_max = "1s"
[sync]
claim_wait = "1s"
{f'store = "file://{self.store}"' if self.store else ""}
[disk]
prune_above = "99.5%"
prune_to = "99%"
[http]
port = 0
[log]
format = "json"
"""

    # -- what the programs say of themselves ---------------------------------------------------------------------------

    def told(self, name: str, after: float = 0.0) -> list[dict[str, Any]]:
        """Lines of ``name.jsonl`` from after this second. A line that a kill cut off is none."""
        try:
            lines = (self.control / f"{name}.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [line for line in map(_whole_line, lines) if line is not None and line["at"] > after]

    def starts(self, after: float = 0.0) -> list[dict[str, Any]]:
        """Lives of the first rank, with the step that each was told to resume from (None: fresh)."""
        found = self.told("lives", after)
        for life in found:
            match = self.trainer.checkpoint.search(Path(life["resumed"]).name)
            assert bool(match) == bool(life["resumed"]), f"no checkpoint of this trainer: {life['resumed']}"
            life["step"] = int(match.group(1)) if match else None
            names = (self.trainer.checkpoint.search(name) for name in life["here"])
            life["present"] = sorted(int(n.group(1)) for n in names if n)
        return found

    def steps_made(self, after: float = 0.0) -> int:
        """The last step that was finished after this second; 0 for none."""
        made = self.told("steps", after)
        return int(made[-1]["step"]) if made else 0

    @property
    def pid(self) -> int:
        """The first rank; 0 while none lives."""
        try:
            pid = int((self.control / "trainer.pid").read_text())
        except (OSError, ValueError):
            return 0
        return pid if alive(pid) else 0

    @property
    def ended(self) -> bool:
        return (self.output / "final.pt").exists()

    @property
    def checkpoints(self) -> Path:
        return self.output / self.trainer.below if self.trainer.below else self.output

    def saving(self) -> bool:
        """A checkpoint is there, or was begun, of which the library has not yet said that it is saved."""
        start = self.starts()[-1]
        try:
            begun = list(self.trainer.found(self.checkpoints))
        except FileNotFoundError:
            begun = []
        begun += [line["step"] for line in self.told("begun", start["at"])]
        saved = [start["step"] or 0, *(line["step"] for line in self.told("saves", start["at"]))]
        return bool(begun) and max(begun) > max(saved)

    def quarantined(self) -> dict[Path, int]:
        """Checkpoints in quarantine, and their steps."""
        places = [p for p in (self.output.parent / ".podwatch").rglob("quarantine") if p.is_dir()]
        found = {}
        for directory in [inner for place in places for inner in (place, *place.iterdir()) if inner.is_dir()]:
            found.update({path: step for step, path in self.trainer.found(directory).items()})
        return found

    # -- waiting -------------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """While training goes on: a run that has ended has too few steps for this machine."""

        def met() -> Any:
            assert not self.ended, f"the run ended while the test waited for: {what}"
            return condition()

        return self.daemon.wait_for(met, PATIENCE, what)

    def wait_confirmed(self, after: int) -> None:
        self.daemon.wait_event("trainer-confirmed", PATIENCE, after=after)

    # -- blows ---------------------------------------------------------------------------------------------------------

    def busy(self, busy: bool) -> None:
        """What the GPUs show. A hang is confirmed by nothing else here."""
        for index in (0, 1):
            self.world.set_load(index, utilization=80 if busy else 0)

    def processes(self) -> list[int]:
        """First rank, the others, and their launcher where there is one."""
        pid = self.pid
        if not pid or self.trainer.ranks == 1:
            return [pid] if pid else []
        launcher = psutil.Process(pid).ppid()
        return [pid, *(c.pid for c in psutil.Process(launcher).children() if c.pid != pid), launcher]

    def kill_podwatch(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.kill()
        self.daemon.process.wait()

    def kill_everything(self) -> None:
        """podwatch, supervisor and trainer, in one moment."""
        record = json.loads((self.root / "state" / self.run_id / "supervisor" / "record.json").read_text())
        pids = [int(record["supervisor"]), *self.processes()]
        assert self.daemon.process is not None
        self.daemon.process.kill()
        for pid in pids:
            forking.kill(pid)
        self.daemon.process.wait()

    def order(self, what: str) -> None:
        (self.control / "order.new").write_text(what)
        (self.control / "order.new").replace(self.control / "order")

    def quick(self) -> None:
        """No pauses any more: what is left is made as fast as it goes."""
        (self.control / "slow").unlink()

    def members(self) -> list[int]:
        own = self.daemon.process.pid if self.daemon.process is not None else 0
        return [pid for pid in members_of(self.run_id, self.root) if pid != own]

    def close(self) -> None:
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.kill_podwatch()
        end_all(self.members)
        self.cards.stop()


class Untouched:
    """The same run beside it, that nobody guards and nobody touches."""

    def __init__(self, directory: Path, trainer: Trainer, steps: int) -> None:
        self.output = directory / "reference"
        self._log = directory / "reference.log"
        environ = {**os.environ, **QUIET}
        environ.pop("TRAINERS_CONTROL", None)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                trainer.command(self.output, steps), cwd=directory, env=environ, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def weights(self) -> Path:
        """Its final weights, once it has ended."""
        code = self._process.wait(PATIENCE * 3)
        assert code == 0, f"the run that nobody touched failed:\n{self._log.read_text(errors='replace')[-2000:]}"
        return self.output / "final.pt"

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _whole_line(line: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found
