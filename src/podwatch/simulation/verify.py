"""Proves the demo's claims: follows the pod's events, log and processes, then reads every file back and compares."""

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import Event, EventName, Incident
from podwatch.domain.finding import Severity
from podwatch.journal.journal import Journal
from podwatch.simulation.pod import Pod
from podwatch.simulation.run_files import RESUME_FLAG
from podwatch.store.inventory import take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.verify import verify
from podwatch.system.clock import SystemClock

# -- output of the demo ----------------------------------------------------------------------------------------------


STYLES = {"demo": "bold cyan", "fault": "bold magenta", "bad": "bold red", "warn": "yellow", "good": "green", "": ""}


class Screen:
    """Lines with the wall-clock time and the seconds since the start. Colours only on a terminal without NO_COLOR, and
    where rich is installed (``podwatch[demo]``)."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._began = time.monotonic()
        self._console = None
        if self._out.isatty() and not os.environ.get("NO_COLOR"):
            with contextlib.suppress(ImportError):
                from rich.console import Console

                self._console = Console(file=self._out, highlight=False, soft_wrap=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def say(self, who: str, text: str, style: str = "") -> None:
        """One line; ``who`` is the actor: demo, training or podwatch."""
        clean = "".join(c if c.isprintable() else " " for c in text)
        self.plain(f"{time.strftime('%H:%M:%S')} {self.elapsed:5.1f}s  {who:<9} {clean}", style)

    def plain(self, text: str, style: str = "") -> None:
        if self._console is not None:
            from rich.text import Text

            self._console.print(Text(text, style=STYLES[style]))
        else:
            print(text, file=self._out, flush=True)

    def event(self, event: Event) -> None:
        style = {Severity.CRITICAL: "bad", Severity.WARNING: "warn"}.get(event.severity, "")
        self.say("podwatch", event.message, style)


# -- observation of the pod ------------------------------------------------------------------------------------------
# The journal's events in order, the trainer's own log, the process list.

_STEP = re.compile(rb"SUCCESS\s+Step (\d+) \|")
STATUS_SECONDS = 0.4
_QUIET = frozenset({EventName.SENSOR_CHANGED, EventName.UPLOAD_STARTED})
"""Events that the demo does not print."""


class DemoFailed(PodwatchError):  # noqa: N818 - reads as a sentence where it is raised
    """An expected event did not happen."""


class Watching:
    """Watches one pod. ``events`` are all events so far."""

    def __init__(self, pod: Pod, screen: Screen) -> None:
        self._pod, self._screen = pod, screen
        self._journal: Journal | None = None
        self._last_id = 0
        self._told_step = -1
        self._next_status = 0.0
        self._last_message = ""
        self.events: list[Event] = []
        self.worst_used_ratio = 0.0

    def look(self) -> None:
        """Read and print what is new. Raises DemoFailed when the daemon is gone."""
        for event in self._new_events():
            self.events.append(event)
            if event.name not in _QUIET and event.message != self._last_message:
                self._screen.event(event)
            self._last_message = event.message
        self._tell_progress()
        daemon = self._pod.daemon
        if daemon is not None and daemon.poll() is not None:
            raise DemoFailed(
                f"podwatch ended with code {daemon.returncode}", where=str(self._pod.log), fix=_tail_text(self._pod.log)
            )

    def wait(self, what: str, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until ``condition`` holds, checking ten times a second. Raises DemoFailed after ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                raise DemoFailed(f"did not happen within {seconds:.0f} s: {what}", where=str(self._pod.log))
            time.sleep(0.1)

    def find(self, name: EventName, since_wall: float = 0.0, **fields: object) -> Event | None:
        """The first event of that name since then whose fields have these values."""
        return next((event for event in self.all(name, since_wall) if _has(event, fields)), None)

    def all(self, name: EventName, since_wall: float = 0.0) -> list[Event]:
        return [event for event in self.events if event.name is name and event.wall >= since_wall]

    def incidents(self) -> list[Incident]:
        return self._journal.incidents() if self._journal is not None else []

    def step(self) -> int | None:
        """The newest step that the trainer has reported since its last start."""
        try:
            with (self._pod.output_dir / "logs" / "trainer.log").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - 65_536))
                return max((int(number) for number in _STEP.findall(file.read())), default=None)
        except FileNotFoundError:
            return None

    def resumed_from(self) -> int | None:
        """The step on the command line of the running launcher, from the process list."""
        for pid in self._pod.processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if len(words) > 2 and words[2].endswith("/bin/rl"):
                for position, word in enumerate(words[:-1]):
                    if word == RESUME_FLAG:
                        return int(words[position + 1])
        return None

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _new_events(self) -> list[Event]:
        if self._journal is None:
            path = self._pod.state / self._pod.run_id / "journal.sqlite"
            if not path.exists():
                return []
            try:
                self._journal = Journal.open(path, read_only=True)
            except HostError:
                return []
        try:
            found = self._journal.events(after_id=self._last_id)
        except HostError:
            if self._last_id:
                raise
            self.close()  # opened while the daemon was still creating it
            return []
        if found:
            self._last_id = found[-1].id
        return found

    def _tell_progress(self) -> None:
        """Print a line whenever the trainer passes another multiple of the checkpoint interval."""
        now = time.monotonic()
        if now < self._next_status:
            return
        self._next_status = now + STATUS_SECONDS
        status = self._pod.status() or {}
        ratio = float((status.get("disk") or {}).get("used_ratio") or 0.0)
        self.worst_used_ratio = max(self.worst_used_ratio, ratio)
        step, interval = self.step(), self._pod.shape.interval
        if step is None:
            self._told_step = -1
        elif self._told_step < 0 or step // interval != self._told_step // interval:
            self._told_step = step
            memory = [
                f"GPU {gpu['index']} {(gpu['memory_used_bytes'] or 0) / (1 << 30):.0f} GiB"
                for gpu in status.get("gpus", [])
            ]
            self._screen.say("training", ", ".join([f"step {step}", *memory, f"disk {ratio:.0%}"]), "good")


def _has(event: Event, fields: dict[str, object]) -> bool:
    return all(event.fields.get(name) == value for name, value in fields.items())


def _tail_text(path: Path) -> str:
    try:
        return " / ".join(path.read_text(errors="replace").strip().splitlines()[-3:])[-600:]
    except OSError:
        return "cannot read its log"


# -- proof of the contents -------------------------------------------------------------------------------------------
# Relies on no status and no event.


@dataclass(frozen=True, slots=True)
class StoreProof:
    """The content of the store. ``step`` is the pointer's step; ``verified`` are the steps of manifests with every byte
    read and compared; ``problems`` is empty if there are none."""

    step: int | None = None
    verified: tuple[int, ...] = ()
    total_bytes: int = 0
    problems: tuple[str, ...] = ()


def prove_store(root: Path, keys: RunKeys) -> StoreProof:
    """Read back every byte of every save, and compare what the pointers name."""
    store = DirectoryObjects(root)
    try:
        inventory = take_inventory(store, keys)
        proofs = list(verify(store, keys, inventory.saves, deep=True))
    except PodwatchError as error:
        return StoreProof(problems=(str(error),))
    sound = [proof.save for proof in proofs if proof.sound]
    problems = [f"step {proof.save.step}: {reason}" for proof in proofs for reason in proof.reasons]
    newest = inventory.pointers[0].pointer if inventory.pointers else None
    for name, pointer in (("the newest pointer", newest), ("latest.json", inventory.latest)):
        if pointer is None:
            problems.append(f"{name} is not there, or cannot be read")
        elif inventory.named_by(pointer) not in sound:
            problems.append(f"{name} names step {pointer.step}, which has no complete checkpoint")
    steps, size = sorted(save.step for save in sound), sum(save.total_bytes for save in sound)
    return StoreProof(None if newest is None else newest.step, tuple(steps), size, tuple(problems))


def prove_local(settings: Settings) -> tuple[tuple[CheckpointSet, ...], tuple[str, ...]]:
    """The complete checkpoints on the pod's disk, and the problems that the structural check found."""
    catalogue = Catalogue(make_layout(settings), SystemClock(), settle=0.0, settle_weak=0.0)
    catalogue.rescan()  # a checkpoint is complete from its second scan on
    complete = tuple(found for found in catalogue.rescan() if found.complete)
    problems = [f"step {found.step}: {reason}" for found in complete for reason in catalogue.verify(found.step)]
    return complete, tuple(problems)
