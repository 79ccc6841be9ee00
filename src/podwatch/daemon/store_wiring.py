"""What the daemon gives the store and takes from it: who this pod is, the Syncer, and restores for recovery."""

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from podwatch.checkpoints.layout import Layout
from podwatch.config.settings import Settings
from podwatch.daemon.state_check import Exits
from podwatch.daemon.variables_of_own_processes import JOB_PROCESS
from podwatch.domain.engine_and_attempt import instance
from podwatch.domain.errors import ExitCode, HostError, PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.lease import Pod
from podwatch.domain.process import ProcessIdentity
from podwatch.domain.run import Mutation, identity
from podwatch.domain.run_state import WonClaim
from podwatch.domain.secrets import scrub_argv
from podwatch.domain.snapshot import Desired
from podwatch.sensors.processes import ProcessSensor
from podwatch.stores.credentials import Credentials, credentials_for
from podwatch.stores.open_store import same_filesystem
from podwatch.sync.interfaces import RunIdentity
from podwatch.system.blocking_calls import Worker
from podwatch.system.procfs import boot_id, from_here, machine_id, start_ticks

if TYPE_CHECKING:
    from podwatch.daemon.checkpoint_loop import Rescans
    from podwatch.daemon.components import Run
    from podwatch.store.restore.restore import Restorer

WANDB_SECONDS = 60.0
"""Interval; reads two links. The first checkpoint comes minutes after the trainer has its W&B run."""
PATIENCE_SECONDS = 10.0


# -- who this pod is -------------------------------------------------------------------------------------------------


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


TAKE_OVER: Final = "--take-over"
"""Kind of request: a flag of `podwatch run`."""


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
    identity = ProcessIdentity.from_text(process)
    if identity is None or not from_here(identity):
        return False
    ticks = start_ticks(identity.pid)
    if ticks is not None:
        return ticks != identity.start_ticks
    try:
        os.kill(identity.pid, 0)  # /proc can hide processes of other users (hidepid)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _digest(digests: Mapping[str, str] | tuple[tuple[str, str], ...]) -> str:
    items = sorted(digests.items() if isinstance(digests, Mapping) else digests)
    return ";".join(f"{Path(name).name}={value[:16]}" for name, value in items)


# -- the run, as sync sees it ----------------------------------------------------------------------------------------


def no_backup(settings: Settings, same_disk_store: bool) -> str:
    """Why the store is refused, else empty: a directory on the checkpoints' own filesystem is no backup."""
    url, output = settings.sync.store, settings.trainer.output_dir
    if not url or same_disk_store or not same_filesystem(url, output):
        return ""
    return f"{url} is on the same filesystem as {output}: it must be on another volume, or a bucket"


class SyncedRun:
    """Implements sync's GuardedRun over the run record, the watched trainer and the guard."""

    def __init__(
        self,
        settings: Settings,
        run: "Run",
        processes: ProcessSensor,
        exits: Exits,
        wandb: WandbIds,
        rescans: "Rescans",
        *,
        take_over: str = "",
    ) -> None:
        """``take_over``: id of an operator's `--take-over` that was not executed yet."""
        self._settings, self._run, self._processes = settings, run, processes
        self._exits, self._wandb = exits, wandb
        self._rescans, self._take_over = rescans, take_over

    def identity(self) -> RunIdentity:
        """With the lineage that is trained now. Never blocks."""
        run = self._run.file.current
        return RunIdentity(
            run_id=self._settings.run_id,
            lineage=run.lineage.id,
            parent_step=run.lineage.parent_step,
            has_parent=run.lineage.parent != "",
            writer_id=run.writer_id,
            host=socket.gethostname(),
            train_command=scrub_argv(self._settings.trainer.command),
            wandb=self._wandb.now(run.wandb),
            layout=self._run.layout.name,
            config_digest=_digest(run.last_start.config_digests) if run.last_start else "",
        )

    def credentials(self) -> Credentials | None:
        return credentials_for(self._run.config.settings)

    def trainer_alive(self) -> bool:
        return self._processes.handle is not None

    def ever_started(self) -> bool:
        return self._run.file.current.last_start is not None

    def claim(self) -> WonClaim | None:
        return self._run.file.current.claim

    def won(self, claim: WonClaim) -> None:
        executed = {TAKE_OVER: self._take_over} if self._take_over else {}
        with contextlib.suppress(HostError):  # the next podwatch claims anew
            self._run.file.edit_now(lambda run: replace(run, claim=claim, executed={**run.executed, **executed}))

    def must_not_train(self, why: str) -> None:
        """Another pod holds the run: exit without training; the caller can retry later."""
        text = f"{why}. podwatch exits; to take the run over: `podwatch run --take-over`"
        self._run.emit(Event(EventName.DAEMON_STOPPING, self._run.clock.wall(), text, Severity.CRITICAL))
        self._exits.leave(ExitCode.TRY_AGAIN)

    def training_finished(self) -> bool:
        return self._run.file.current.desired is Desired.FINISHED

    def withheld(self) -> str:
        return self._run.guard.blocked_reason(Mutation.PUBLISH)

    def pins(self) -> Mapping[int, str]:
        return self._run.file.current.pins

    def named(self) -> Mapping[int, str]:
        return self._rescans.named

    def observes(self) -> bool:
        return self._run.config.settings.mode == "observe"


# -- restores --------------------------------------------------------------------------------------------------------


def make_restorer(settings: Settings, run: "Run") -> "Restorer":
    """The Restorer of this run, which reads the store's key at each use."""
    from podwatch.store.keys import RunKeys
    from podwatch.store.objects.access import access_for
    from podwatch.store.objects.open import parse_url
    from podwatch.store.restore.restore import Restorer, StoreOfRun

    url = settings.sync.store
    keys = RunKeys(settings.run_id, parse_url(url).prefix)
    store = StoreOfRun(url, keys, lambda: access_for(run.config.settings), settings.sync.connections)
    return Restorer(store, run.layout, run.workspace, run.record_files)
