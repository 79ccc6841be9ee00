"""The run and this pod, as the backup must know them: who publishes, what trains, what may be written."""

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from podwatch.app.variables_of_own_processes import JOB_PROCESS
from podwatch.checkpoints.layout import Layout
from podwatch.config.settings import Settings
from podwatch.domain.engine_and_attempt import instance
from podwatch.domain.errors import ExitCode, HostError, PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Claim, Pod
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.run import Lineage, Mutation, identity
from podwatch.domain.run_state import RunState, WonClaim
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.snapshot import Desired
from podwatch.sensors.processes import ProcessSensor
from podwatch.store.interfaces import Author
from podwatch.system.blocking_calls import Worker
from podwatch.system.procfs import boot_id, from_here, machine_id, start_ticks

if TYPE_CHECKING:
    from podwatch.app.build import Run
    from podwatch.app.rescans import Rescans
    from podwatch.app.shutdown import Exit

TAKE_OVER: Final = "--take-over"
"""Kind of request: a flag of `podwatch run`."""
PATIENCE_SECONDS = 10.0


class WandbIds:
    """The trainer's W&B ids as they are on disk now, for manifests: the run record gets them at the next start only.

    The constructor reads the disk and blocks. Call ``look`` periodically; ``now`` never blocks."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._found: Mapping[str, str] = {}
        self._worker: Worker | None = None
        self._look()

    def now(self, known: Mapping[str, str]) -> dict[str, str]:
        """The newest known ids. ``known``: those in the run record."""
        return identity(known, self._found)

    async def look(self) -> None:
        self._worker = self._worker or Worker("wandb ids")
        try:
            await self._worker.call(self._look, timeout=PATIENCE_SECONDS)
        except TimeoutError:
            return  # the sensors report a hung disk

    def _look(self) -> None:
        try:
            self._found = self._layout.wandb_identity()
        except (PodwatchError, OSError):
            return


def this_pod(writer_id: str, output_dir: Path, environ: Mapping[str, str] = MappingProxyType({})) -> Pod:
    """``environ``: this process's, for the engine's job and attempt."""
    path = os.path.realpath(output_dir)
    try:
        found = Path(path).stat()
        path += f"\0{found.st_dev}:{found.st_ino}"  # two containers of one host can have the same path on two mounts
    except OSError:
        pass  # does not exist yet: the path alone
    place = hashlib.sha256(path.encode()).hexdigest()[:16]
    process = environ.get(JOB_PROCESS, "")
    return Pod(writer_id, machine_id(), boot_id(), place, socket.gethostname(), instance(environ), process)


def attempt_ended(process: str) -> bool:
    """Whether an earlier attempt of this job has provably ended: its process was on this boot of this machine, in this
    PID namespace, and is gone. Anything else proves nothing. Its supervisor ends with it; while it has not, it holds
    the run lock, and no start happens here."""
    found = ProcessIdentity.from_text(process)
    if found is None or not from_here(found):
        return False
    ticks = start_ticks(found.pid)
    if ticks is not None:
        return ticks != found.start_ticks
    try:
        os.kill(found.pid, 0)  # /proc can hide processes of other users (hidepid)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class RunSide:
    """Implements ``store.interfaces.OwnSide`` over the run record, the watched trainer and the guard."""

    def __init__(
        self, settings: Settings, run: "Run", processes: ProcessSensor, exits: "Exit", wandb: WandbIds,
        rescans: "Rescans", *, pod: Pod, take_over: str = "",
    ) -> None:  # fmt: skip
        """``take_over``: id of an operator's `--take-over` that was not executed yet."""
        self._settings, self._run, self._processes = settings, run, processes
        self._exits, self._wandb, self._rescans = exits, wandb, rescans
        self._pod, self._take_over = pod, take_over
        self.identity = run.layout.table.identity
        """The parts that make a save, where a resume writes others again; empty: all."""

    # -- the lease

    def trainer_alive(self) -> bool:
        return self._processes.handle is not None

    def last_claim(self) -> Claim | None:
        """Of another attempt of a job only if that has ended: it can share the state directory with one that lives."""
        found = self.record.claim
        if found is None or not self._is_own(found.process):
            return None
        return Claim(found.generation, found.nonce, writer_id=self.record.writer_id)

    def _is_own(self, process: str) -> bool:
        return process == self._pod.process or (bool(process) and attempt_ended(process))

    def claimed(self, claim: Claim) -> None:
        executed = {TAKE_OVER: self._take_over} if self._take_over else {}
        won = WonClaim(claim.generation, claim.nonce, self._pod.boot_id, self._pod.process)
        with contextlib.suppress(HostError):  # the next podwatch claims again, and waits
            self._run.file.edit_now(lambda run: replace(run, claim=won, executed={**run.executed, **executed}))

    def job_ended(self, process: str) -> bool:
        return attempt_ended(process)

    def must_not_train(self, why: str) -> None:
        """Another pod holds the run: exit without training; the caller can retry later."""
        text = f"{why}. podwatch exits; to take the run over: `podwatch run --take-over`"
        self._run.emit(Event(EventName.DAEMON_STOPPING, self._run.clock.wall(), text, Severity.CRITICAL))
        self._exits.leave(ExitCode.TRY_AGAIN)

    # -- the run

    @property
    def record(self) -> RunState:
        return self._run.file.current

    @property
    def lineage(self) -> Lineage:
        return self.record.lineage

    @property
    def pins(self) -> Mapping[int, str]:
        """The steps that an operator or an evaluation pinned, with the reasons."""
        return self.record.pins

    @property
    def named(self) -> Mapping[int, str]:
        """The steps that a file of the trainer names, with that file."""
        return self._rescans.named

    @property
    def finished(self) -> bool:
        return self.record.desired is Desired.FINISHED

    @property
    def observes(self) -> bool:
        """Mode observe, in which podwatch deletes nothing. A reload can change it."""
        return self._run.config.settings.mode == "observe"

    def withheld(self) -> str:
        """Why nothing may be uploaded, published or deleted in the store now; empty where it may."""
        return self._run.guard.blocked_reason(Mutation.PUBLISH)

    def in_use(self) -> frozenset[int]:
        """Steps from which training was started last, or is going to be."""
        run = self.record
        steps = (run.started_from, run.wanted)
        return frozenset(step for step in steps if step is not None)

    async def note_stored(self) -> None:
        """Record that the store has a save of this run: without its answer no start may begin from nothing then."""
        if not self.record.stored:
            with contextlib.suppress(PodwatchError):
                await self._run.file.edit(lambda run: replace(run, stored=True))

    async def adopt_pins(self, pins: Mapping[int, str]) -> None:
        """Pin the same steps here."""

        def adopted(run: RunState) -> RunState:
            for step in pins.keys() - run.pins.keys():
                run = run.pinned(step, pins[step])
            return run

        with contextlib.suppress(PodwatchError):  # that has a finding of its own
            await self._run.file.edit(adopted)

    def author(self, *, start_id: str = "", from_step: int | None = None, world_size: int | None = None) -> Author:
        """For a manifest or pointer, with the lineage that is trained now. Never blocks."""
        run = self.record
        last = run.last_start
        return Author(
            self._settings.run_id, run.writer_id, socket.gethostname(), run.lineage.id, self._run.layout.name,
            start_id, from_step, world_size, _digest(last.config_digests) if last else "",
            tuple(scrub_argv(self._settings.trainer.command)), dict(self._wandb.now(run.wandb)),
        )  # fmt: skip


def _digest(digests: tuple[tuple[str, str], ...]) -> str:
    return ";".join(f"{Path(name).name}={value[:16]}" for name, value in sorted(digests))
