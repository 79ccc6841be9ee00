"""The torch example under a real podwatch, with a B2 store and a GPU stand-in, and all that can be asked about it."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podwatch.system import procfs
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.hurry import hurry
from tests.support.nvml import NvmlWorld
from tests.support.ports import free_port
from tests.support.rig import Cards, alive, end_all

EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-rl"
AUDIT = Path(__file__).with_name("audit")
INTERVAL = 8
STEP_SECONDS, SAVE_SECONDS = 0.15, 0.5
PATIENCE = 120.0
"""Seconds for anything that normally takes a few: the machine may be busy with other things."""


def example_command(output: Path, variant: str, steps: int, *, quick: bool = False) -> list[str]:
    times = [] if quick else ["--step-time", str(STEP_SECONDS), "--save-time", str(SAVE_SECONDS)]
    return [
        sys.executable, str(EXAMPLE / "rl.py"), "--output-dir", str(output), "--layout", variant,
        "--port", str(free_port()), "--max-steps", str(steps), "--ckpt", "--ckpt.interval", str(INTERVAL), *times,
    ]  # fmt: skip


class GuardedRun:
    """``variant`` is prime-rl's layout, A or B. Steps are counted as finished ones: checkpoint N holds N of them."""

    def __init__(self, root: Path, library: Path, variant: str, steps: int) -> None:
        self.root, self.variant, self.steps = root, variant, steps
        self.output, self.control = root / "work" / "outputs", root / "control"
        self.control.mkdir(parents=True)
        self.output.parent.mkdir()
        self.run_id = f"chaos-{os.getpid()}"
        self.world = NvmlWorld(root / "world", devices=2)
        self.cards = Cards(self.world, self.control)
        self.store = B2Server(root / "b2").start()
        self._read, self._events = 0, list[dict[str, Any]]()
        self.lies: list[str] = []
        """What the store saw of pointers that lie, outages included."""
        credentials = {"B2_ENVIRONMENT": self.store.url, "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY}
        environ = {**self.world.environment(library), **credentials}
        self.daemon = DaemonProcess(root, self._config(), environ)
        self.cards.start()

    def _config(self) -> str:
        return f"""
run_id = "{self.run_id}"
state_dir = "{self.root / "state"}"
[trainer]
layout = "prime-rl"
output_dir = "{self.output}"
cwd = "{self.output.parent}"
command = {json.dumps(example_command(self.output, self.variant, self.steps))}
stop_grace = "5s"
save_grace = "5s"
[trainer.env]
PYTHONPATH = "{AUDIT}"
CHAOS_CONTROL = "{self.control}"
[gpu]
inference = [0]
trainer = [1]
poll = "0.25s"
hold = "1s"
deadline = "0.5s"
[checkpoints]
rescan = "0.5s"
settle = "0.3s"
[recovery]
backoff_min = "0.2s"
backoff_max = "1s"
[sync]
store = "b2://{BUCKET}"
part_size = "5MB"
[disk]
prune_above = "99.5%"
prune_to = "99%"
[http]
port = 0
[log]
format = "json"
"""

    # -- who lives ----------------------------------------------------------------------------------------------------

    def pid(self, role: str) -> int:
        """0 while none lives."""
        try:
            pid = int((self.control / f"{role}.pid").read_text())
        except (OSError, ValueError):
            return 0
        return pid if alive(pid) else 0

    @property
    def supervisor(self) -> int:
        """0 while none lives."""
        try:
            found = json.loads((self.root / "state" / self.run_id / "supervisor" / "record.json").read_text())
        except (OSError, ValueError):
            return 0
        return int(found["supervisor"]) if alive(int(found["supervisor"])) else 0

    def starts(self, after: float = 0.0) -> list[dict[str, Any]]:
        """Launchers that began after this second: pid, at, argv, and ``resumed`` (None: fresh)."""
        try:
            lives = [json.loads(line) for line in (self.control / "lives.jsonl").read_text().splitlines()]
        except OSError:
            return []
        found = [life for life in lives if life["role"] == "rl" and life["at"] > after]
        for life in found:
            flag = "--ckpt.resume-step" if self.variant == "A" else "--resume.step"
            life["resumed"] = int(life["argv"][life["argv"].index(flag) + 1]) if flag in life["argv"] else None
        return found

    def members(self) -> list[int]:
        """Everything started for this run that lives: podwatch and the store apart."""
        found = []
        for pid in procfs.all_pids():
            if pid != os.getpid() and alive(pid) and pid != (self.daemon.process.pid if self.daemon.process else 0):
                marker = procfs.environment_value(pid, "PODWATCH_RUN") == self.run_id
                named = any(str(self.root) in word for word in procfs.command(pid))
                if (marker or named) and "tests.support.b2server" not in procfs.command(pid):
                    found.append(pid)
        return found

    # -- how far it is ------------------------------------------------------------------------------------------------

    def finished_steps(self) -> int:
        """Steps that the present (or the last) trainer has behind it, those before its checkpoint included."""
        starts = self.starts()
        base = (starts[-1]["resumed"] or 0) if starts else 0
        try:
            text = (self.output / "logs" / "trainer.log").read_text(errors="replace")
        except OSError:
            return base
        if starts and (self.output / "logs" / "trainer.log").stat().st_mtime < starts[-1]["at"]:
            return base  # still the log of the one before
        done = [int(n) for n in re.findall(r"SUCCESS Step (\d+)", text)]
        return max([base, *(n + 1 if self.variant == "A" else n for n in done)])

    def whole(self) -> int:
        """The newest checkpoint with all its parts on the disk; 0 for none."""
        own = self.output / "run_default" if self.variant == "A" else self.output
        steps = [int(p.parts[-3][5:]) for p in self.output.glob("checkpoints/step_*/trainer/.metadata")]
        both = [n for n in steps if (own / "checkpoints" / f"step_{n}" / "orchestrator" / "progress.pt").exists()]
        return max(both, default=0)

    @property
    def ended(self) -> bool:
        return (self.output / "final.pt").exists()

    @property
    def saving(self) -> bool:
        """A checkpoint has its first file and not its last one."""
        for path in self.output.glob("checkpoints/step_*/trainer"):
            if (path / "__0_0.distcp").exists() and not (path / ".metadata").exists():
                return True
        return False

    def events(self) -> list[dict[str, Any]]:
        """As the daemon's own, reading only what is new: a long run logs thousands."""
        with self.daemon.log.open("rb") as log:
            log.seek(self._read)
            lines = log.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:
            if line.startswith(b"{") and b'"podwatch_event"' in line:
                self._events.append(json.loads(line))
        return self._events

    def wait_event(self, name: str, *, after: int = 0, **fields: Any) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            if self.daemon.process is not None:
                hurry(self.daemon.process.pid)
            for event in self.events()[after:]:
                if event["podwatch_event"] == name and all(event.get(k) == v for k, v in fields.items()):
                    return event
            return None

        return dict(self.wait(found, f"event {name} {fields or ''}"))

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> Any:
        return self.daemon.wait_for(condition, seconds, what)

    def wait_step(self, step: int) -> None:
        self.wait(lambda: self.finished_steps() >= step and self.pid("trainer"), f"step {step}")

    @property
    def second_signals(self) -> list[str]:
        """What podwatch could confirm a death by just now."""
        status = self.daemon.status() or {}
        return list(status.get("daemon", {}).get("second_signals", ()))

    # -- podwatch and the store ---------------------------------------------------------------------------------------

    def kill_podwatch(self) -> None:
        assert self.daemon.process is not None
        self.daemon.process.kill()
        self.daemon.process.wait()

    def store_away(self) -> None:
        self.lies += self.store.violations()
        self.store.stop()

    def store_back(self) -> None:
        self.store.start()

    def close(self) -> None:
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.kill_podwatch()
        end_all(self.members)
        self.cards.stop()
        self.store.stop()


class Uninterrupted:
    """The same run with nobody killing anything, beside the other one: its pauses leave the time for it."""

    def __init__(self, directory: Path, variant: str, steps: int) -> None:
        self._output = directory / "reference"
        command = example_command(self._output, variant, steps, quick=True)
        with (directory / "reference.log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, start_new_session=True)

    def weights(self, seconds: float) -> Path:
        """Its final weights, once it has ended."""
        assert self._process.wait(seconds) == 0, "the run that nobody touched failed by itself"
        return self._output / "final.pt"

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def pause(dice: random.Random, least: float, most: float) -> None:
    time.sleep(dice.uniform(least, most))
