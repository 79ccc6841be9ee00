"""What earlier attempts at this run left in the store, asked before training starts and completed before the job ends
(job/judge_earlier_attempts.py decides; docs/jobs.md).

Everything here is bounded and nothing here raises: without an answer of the store training starts, and no end of a job
waits for it. The lease decides which pod trains, not this.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from podwatch.app.settings_in_force import Configuration
from podwatch.app.variables_of_own_processes import JOB_PROCESS
from podwatch.config.settings import RecoverySettings, Settings
from podwatch.domain.earlier_attempts import Host, RunVerdict
from podwatch.domain.engine_and_attempt import instance
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.finding import Severity
from podwatch.domain.snapshot import GpuSample
from podwatch.job.exit_code import JobEnd
from podwatch.job.judge_earlier_attempts import (
    Attempt,
    advanced,
    ask_hosts,
    at_end,
    at_start,
    began,
    foretold,
)
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.start_plan import config_digests, working_directory
from podwatch.sensors.base import Sensor
from podwatch.sensors.gpu import GpuSensor
from podwatch.store.keys import RunKeys
from podwatch.store.objects.access import access_for
from podwatch.store.objects.base import Objects
from podwatch.store.objects.open import open_objects, parse_url
from podwatch.store.runs.read import store_time
from podwatch.store.verdict import read_verdict, write_verdict
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.files import read_file
from podwatch.system.procfs import boot_id, machine_id

if TYPE_CHECKING:
    from podwatch.app.backup.backup import Backup
    from podwatch.app.build import Run

ANSWER_SECONDS: Final = 10.0
"""Limit of one read, and of one write. B2 needs one second; the job's start waits for the first."""
LOOK_SECONDS: Final = 2.0
_MAX_ENV_FILE = 1 << 20
_OF_TRAINING = ("trainer", "checkpoints", "recovery")
"""Sections of the configuration that decide whether a command works. Not [gpu] and [inference]: `--job` without a file
detects them on each machine."""
_PLACES = frozenset({"output_dir", "checkpoint_dir", "env_file", "cwd"})
"""Settings of [trainer] that differ between two machines for the same run."""


class VerdictFile:
    """``verdict.json`` of one run, with the store's key read again after an error. Blocks; for one thread."""

    def __init__(self, opened: Callable[[], Objects], keys: RunKeys, clock: Clock) -> None:
        self._opened, self._keys, self._clock = opened, keys, clock
        self._store: Objects | None = None

    def read(self) -> tuple[RunVerdict, float]:
        """The verdict, and the time by the store's clock (epoch seconds). Raises as a store does."""
        with self._open() as store:
            verdict = read_verdict(store, self._keys)
            return verdict, store_time(store, self._clock.wall())

    def write(self, verdict: RunVerdict) -> None:
        """Replace it. Raises as a store does."""
        with self._open() as store:
            write_verdict(store, self._keys, verdict, store_time(store, self._clock.wall()))

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    @contextlib.contextmanager
    def _open(self) -> Iterator[Objects]:
        if self._store is None:
            self._store = self._opened()
        try:
            yield self._store
        except BaseException:
            self.close()
            raise


class JobVerdicts:
    """The verdicts of a job in the store. One per daemon; all methods on the event loop."""

    def __init__(
        self,
        file: VerdictFile,
        own: "OwnAttempt",
        training: RecoveryContext,
        clock: Clock,
        recovery: RecoverySettings,
        emit: Callable[[Event], None],
    ) -> None:
        self._file, self._own, self._training = file, own, training
        self._clock, self._recovery, self._emit = clock, recovery, emit
        self._worker = Worker("verdicts")
        self._kept = RunVerdict()
        self._stored = RunVerdict()
        """What the store has, as far as this attempt knows."""
        self._ahead = 0.0
        """Seconds that this machine's clock is ahead of the store's."""
        self._turn = asyncio.Lock()
        self._began = self._over = False
        self._foretold = False
        """An end of this attempt was recorded whose last data is being stored."""
        self._step: int | None = None
        self.not_before_wall: float | None = None
        """After ``forbids``: training starts no earlier (epoch seconds of this machine's clock)."""

    async def forbids(self) -> JobEnd | None:
        """Why training must not start in this attempt; None if it can."""
        try:
            self._stored, now = await self._worker.call(self._file.read, timeout=ANSWER_SECONDS)
            self._ahead = self._clock.wall() - now
            attempt = await self._attempt()
        except (PodwatchError, OSError) as error:
            text = f"cannot read from the store how earlier attempts of this job ended: {_reason(error)}"
            self._say(EventName.START_WARNING, f"{text}; training starts")
            return None
        found = at_start(self._stored, attempt, self._recovery)
        self._kept = found.kept
        if found.end is not None:  # else with the first record of this attempt, once it holds the run and trains
            await self._write()
        if found.not_before_wall is not None:
            self.not_before_wall = found.not_before_wall + self._ahead
        return found.end

    async def forbids_hosts(self, hosts: Mapping[str, Host]) -> JobEnd | None:
        """Why training must not start on these machines of the other nodes; None if it can. After ``forbids``."""
        async with self._turn:
            self._kept, end = ask_hosts(self._kept, hosts, self._clock.wall() - self._ahead)
            if end is not None:
                await self._write()
            return end

    async def watch(self) -> None:
        """Record that training started, and that it made progress. Never returns."""
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            with contextlib.suppress(OSError):  # a timeout is one: the next turn tries again
                await self.update()

    async def update(self) -> None:
        """One turn of ``watch``. Raises TimeoutError if the disk hangs."""
        async with self._turn:
            if not self._over:
                await self._update()

    async def _update(self) -> None:
        training = self._training.attempt
        if self._training.handle is not None and (self._foretold or not self._began):
            self._kept = began(self._kept, await self._attempt(), self._training.run.lineage)
            self._began, self._foretold = True, False
            await self._write()
        step = training.last_step if training is not None and training.made_step else None
        if step is not None and (self._step is None or step > self._step):
            self._step = step
            self._kept = advanced(self._kept, step)
            # That there was progress is recorded at once, how far it went only at the end.
            if (self._kept.attempt, self._kept.failures) != (self._stored.attempt, self._stored.failures):
                await self._write()

    async def foretell(self, end: JobEnd) -> None:
        """Record how this attempt ends, while its last data is being stored."""
        async with self._turn:
            try:
                await self._update()
                attempt = await self._attempt()
            except OSError:
                return  # the disk hangs
            self._kept = foretold(self._kept, end, attempt, self._step, self._recovery)
            self._foretold = True
            await self._write()

    async def keep(self, end: JobEnd) -> JobEnd:
        """Record how this attempt ended; returns the end that counts (job/judge_earlier_attempts.py)."""
        async with self._turn:
            try:
                await self._update()
                attempt = await self._attempt()
            except OSError:
                return end  # the disk hangs
            self._over = True
            before = self._kept
            self._kept, counted = at_end(before, end, attempt, self._step, self._recovery)
            if self._kept != before:  # an attempt that another pod's replaced, or that never trained, leaves no record
                await self._write()
            return counted

    def close(self) -> None:
        self._worker.close()

    async def _attempt(self) -> Attempt:
        now = self._clock.wall() - self._ahead
        return await self._worker.call(self._own.describe, now, timeout=ANSWER_SECONDS)

    async def _write(self) -> None:
        if self._kept == self._stored:
            return
        try:
            await self._worker.call(self._file.write, self._kept, timeout=ANSWER_SECONDS)
        except (PodwatchError, OSError) as error:
            text = f"cannot record in the store how this job's attempts end: {_reason(error)}"
            self._say(EventName.SYNC_FAILED, f"{text}; the next attempt does not know of this one")
        else:
            self._stored = self._kept

    def _say(self, name: EventName, text: str) -> None:
        self._emit(Event(name, self._clock.wall(), text, Severity.WARNING))


def _reason(error: Exception) -> str:
    return str(error) or f"no answer within {ANSWER_SECONDS:.0f} s"


# -- this attempt ----------------------------------------------------------------------------------------------------


class OwnAttempt:
    """What identifies this attempt and its machine. ``retry``: an operator passed `--retry`."""

    def __init__(self, config: Configuration, gpus: GpuSensor, backup: "Backup", *, retry: bool) -> None:
        self._config, self._gpus, self._backup, self._retry = config, gpus, backup, retry
        self._instance = instance(os.environ)

    def describe(self, now: float) -> Attempt:
        """``now``: epoch seconds by the store's clock. Reads files: blocks."""
        settings = self._config.settings
        return Attempt(
            id=os.environ.get(JOB_PROCESS) or f"{boot_id()}:{os.getpid()}",
            digest=digest(settings),
            host=Host(machine_id(), self._instance.node, run_gpus(settings, self._gpus)),
            now=now,
            instance=self._instance,
            host_name=socket.gethostname(),
            worked=self._backup.status().last_step is not None,
            retry=self._retry,
        )


def run_gpus(settings: Settings, gpus: Sensor[tuple[GpuSample, ...]]) -> tuple[str, ...]:
    """UUIDs of the run's GPUs; of all that are seen if none is configured. A lost GPU keeps its UUID."""
    ours = {*settings.gpu.inference, *settings.gpu.trainer}
    seen = gpus.latest().value or ()
    return tuple(g.uuid for g in seen if g.uuid and (not ours or g.index in ours))


def digest(settings: Settings) -> str:
    """Identifies the command and what decides whether it works: its small files, its environment, and podwatch's own
    settings of training. The same on another machine, where only directories differ. Reads files: blocks."""
    trainer = settings.trainer
    sections = {name: getattr(settings, name).model_dump(mode="json") for name in _OF_TRAINING}
    sections["trainer"] = {name: value for name, value in sections["trainer"].items() if name not in _PLACES}
    named = config_digests(trainer.command, working_directory(settings))
    files = [(PurePath(name).name, found) for name, found in named]
    private = ""
    if trainer.env_file is not None:
        try:
            private = hashlib.sha256(read_file(trainer.env_file, _MAX_ENV_FILE)).hexdigest()
        except OSError:
            private = "unreadable"
    text = json.dumps([sections, files, private], sort_keys=True).replace(
        json.dumps(str(trainer.output_dir))[1:-1], "{out}"
    )
    return hashlib.sha256(f"{settings.run_id}\0{text}".encode("utf-8", "surrogatepass")).hexdigest()


def make_verdicts(
    run: "Run", gpus: GpuSensor, backup: "Backup | None", context: RecoveryContext, *, retry: bool
) -> JobVerdicts | None:
    """None without a usable store: each attempt is then the first."""
    if backup is None:
        return None
    settings = run.config.settings
    url = settings.sync.store

    def opened() -> Objects:
        return open_objects(url, access_for(settings), connections=1)

    file = VerdictFile(opened, RunKeys(settings.run_id, parse_url(url).prefix), run.clock)
    own = OwnAttempt(run.config, gpus, backup, retry=retry)
    return JobVerdicts(file, own, context, run.clock, settings.recovery, run.emit)
