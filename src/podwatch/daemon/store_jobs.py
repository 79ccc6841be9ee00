"""Periodic jobs for the store: heartbeats, sweeps, the pointer's lineage; configuration, logs and incident bundles."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from podwatch.config.command_directory import TYPED_IN
from podwatch.config.loading import LoadedSettings
from podwatch.daemon.components import Components
from podwatch.daemon.pins_of_earlier_pod import adopt_pins
from podwatch.daemon.shutdown import BackgroundTasks
from podwatch.daemon.status_view import StatusSource, heartbeat
from podwatch.daemon.store_wiring import WANDB_SECONDS
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.lease import MOST_PINS, HandedOverSaves, HolderState, pins_of
from podwatch.domain.run import Mutation
from podwatch.domain.secrets import scrub_field
from podwatch.domain.snapshot import Desired, Snapshot
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery.run_file import RunFile
from podwatch.recovery.start_plan import named_files, working_directory
from podwatch.sensors.log_tail import Sources
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import credentials_for
from podwatch.stores.open_store import open_store
from podwatch.sync.interfaces import features_of
from podwatch.sync.upload.child_job import keys_for
from podwatch.system.clock import Clock
from podwatch.system.files import read_file
from podwatch.trainer.environment import read_env_file

if TYPE_CHECKING:
    from podwatch.daemon.tick import Reload
    from podwatch.sync.runs.bootstrap import Start
    from podwatch.sync.syncer import Syncer
    from podwatch.sync.upload.artifacts import Artefact, Artifacts

# -- scheduler -------------------------------------------------------------------------------------------------------
# On apscheduler 3.x, without exact timing. ``misfire_grace_time`` is always set, because its default of one second
# silently skips a late job. Detection never runs here.


Job = Callable[[], Awaitable[None]]


class Jobs:
    """Named periodic coroutines; each runs at most once at a time, and missed runs are made up by one."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(timezone="UTC")

    def every(self, seconds: float, name: str, job: Job) -> None:
        async def run() -> None:
            # podwatch exits: no error of the job, but the scheduler would log a traceback.
            with contextlib.suppress(asyncio.CancelledError):
                await job()

        self._scheduler.add_job(
            run,
            IntervalTrigger(seconds=seconds, timezone="UTC"),
            id=name,
            name=name,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=max(1, int(seconds)),
        )

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)


# -- pointer on the current lineage ----------------------------------------------------------------------------------
# A step back on purpose, or a fresh start, opens a new lineage. From then on the pointer must not name the abandoned
# later step, or a new pod would restore it.

FOLLOWED = "sync.lineage"
"""Journal key: the lineage to which the pointer was last moved."""


class PointerFollower:
    """``follow`` does nothing until the lineage changes; ``run`` calls it again and again, which retries after an
    error."""

    def __init__(self, syncer: "Syncer", file: RunFile, journal: AsyncJournal) -> None:
        self._syncer, self._file, self._journal = syncer, file, journal
        self._followed: str | None = None

    async def run(self, clock: Clock) -> None:
        while True:
            await self.follow()
            await clock.sleep(FOLLOW_SECONDS)

    async def follow(self) -> None:
        lineage = self._file.current.lineage
        if not lineage.parent:
            return
        try:
            if self._followed is None:
                self._followed = str(await self._journal.run(Journal.learned, FOLLOWED, ""))
            if self._followed == lineage.id:
                return
            await self._syncer.repoint(lineage.parent_step)
        except PodwatchError:
            return  # the syncer's state has the reason; the next call retries
        self._followed = lineage.id
        self._journal.post(Journal.learn, FOLLOWED, lineage.id)


# -- jobs of the store -----------------------------------------------------------------------------------------------

STORE_SWEEP_SECONDS = 3600.0
"""Interval of checking whether the daily sweep of the store is due; the check costs nothing."""
FOLLOW_SECONDS = 5.0
"""Interval of checking whether the store's pointer must follow a step back; the check costs nothing."""
TRANSITION_SECONDS = 5.0
"""Least time between two heartbeats at transitions: a restart passes through several phases within a second."""


class StoreJobs:
    """Does nothing without a store."""

    def __init__(self, parts: Components, status: StatusSource) -> None:
        self._parts, self._status = parts, status
        self._syncer = parts.syncer
        self._said: tuple[object, ...] = ()
        self._changed = asyncio.Event()
        self._listed_seq, self._hurried_seq = 0, 0
        """Newest save in the last heartbeat, and the one that hurried a heartbeat last."""

    def ask(self) -> None:
        """Check now whether this pod holds the run: a start of training waits for the answer."""
        if self._syncer is not None:
            self._syncer.ask()

    async def begin(self, jobs: Jobs, tasks: BackgroundTasks) -> None:
        syncer = self._syncer
        if syncer is None:
            return
        await syncer.start()
        tasks.spawn(self._first_beats(), "first heartbeat")
        tasks.spawn(self._transition_beats(), "heartbeats at transitions")
        jobs.every(self._parts.settings.sync.sweep, "sync sweep", self._sweep)
        jobs.every(self._parts.settings.sync.heartbeat, "heartbeat", self.beat)
        jobs.every(WANDB_SECONDS, "wandb ids", self._parts.store.wandb.look)
        jobs.every(STORE_SWEEP_SECONDS, "store sweep", syncer.sweep_store)
        follower = PointerFollower(syncer, self._parts.run.file, self._parts.run.journal)
        tasks.spawn(follower.run(self._parts.run.clock), "descent")

    async def _first_beats(self) -> None:
        """Beat at once each time this pod becomes the holder of the run: other pods read the heartbeat."""
        assert self._syncer is not None
        while True:
            await self._syncer.until_speaking(True)
            await self.beat()
            await self._syncer.until_speaking(False)

    def turn(self, snapshot: Snapshot) -> None:
        """Request a heartbeat at once if phase, desired state, progress or pins changed since the last turn, or if the
        last one lists the store's saves so incompletely that the next pod could not use the list."""
        recovery = self._parts.recovery
        pins = tuple(self._parts.run.file.current.pins)
        now = (recovery.state.phase, recovery.desired, snapshot.newest_step is not None, pins)
        seq = 0 if self._syncer is None else self._syncer.session.newest_seq
        if now != self._said or (seq > self._listed_seq + 1 and seq != self._hurried_seq):
            self._said, self._hurried_seq = now, seq
            self._changed.set()

    async def _transition_beats(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self.beat()
            await self._parts.run.clock.sleep(TRANSITION_SECONDS)

    async def beat(self) -> None:
        await self.say(self._state())

    async def say(self, state: HolderState) -> None:
        if self._syncer is not None:
            session = self._syncer.session
            await adopt_pins(session.lease, self._parts.run.file)
            session.take_over_saves()
            if session.lease is not None:
                self._status.books.accountant.take_over(*session.lease.take_account())
            recovery, sets = self._parts.recovery, self._parts.checkpoints.catalogue.sets
            own = [found for found in sets if recovery.context.owns(found)]
            said = heartbeat(self._status.view(), own, state)
            pins, known = self._parts.run.file.current.pins, session.known_saves()
            if known is not None and len(pins) <= MOST_PINS:  # the next pod deletes what is listed and not pinned
                said, self._listed_seq = replace(said, saves=HandedOverSaves.of(known)), known.seq
            await self._syncer.beat(replace(said, pins=pins_of(pins)), state)

    async def say_leaving(self) -> None:
        """The last heartbeat: released where nothing trains, so that no other pod waits for this one."""
        idle = self._parts.recovery.handle is None
        await self.say(HolderState.RELEASED if idle else HolderState.RESTARTING)

    # -- the run's digests (daemon/notifications.py)

    def sends_digests(self, *, known: bool) -> bool:
        """Whether this pod is the one that sends them: it speaks for the run, or the store does not answer and the time
        of the last one is ``known`` here. Of several nodes, node 0 sends them."""
        if self._parts.store.elsewhere:
            return False
        lease = None if self._syncer is None else self._syncer.session.lease
        return lease is None or lease.speaks or (known and lease.error is not None)

    @property
    def digest_wall(self) -> float | None:
        lease = None if self._syncer is None else self._syncer.session.lease
        return None if lease is None else lease.digest_wall

    async def keep_digest(self, wall: float) -> None:
        """Leave the time of a digest in the heartbeat, for the pod that replaces this one."""
        if self._syncer is not None and self._syncer.session.lease is not None:
            self._syncer.session.lease.note_digest(wall)
            await self.beat()

    def _state(self) -> HolderState:
        recovery = self._parts.recovery
        idle = recovery.handle is None and recovery.desired is not Desired.RUNNING
        return HolderState.RELEASED if idle else HolderState.RUNNING

    async def _sweep(self) -> None:
        if self._syncer is not None:
            self._syncer.sweep()


# -- configuration, logs, incident bundles ----------------------------------------------------------------------------

TELLING = frozenset(
    {EventName.INCIDENT_OPENED, EventName.GAVE_UP, EventName.TRAINER_CONFIRMED, EventName.TRAINER_FINISHED}
)
"""Events after which an upload is due soon: there is a new bundle, a new start, or a last log line."""


def make_artifacts(parts: Components, config: "Reload") -> "Artifacts | None":
    """None without a store, or where ``sync.artefacts`` is off."""
    settings, syncer = parts.settings, parts.syncer
    if syncer is None or not settings.sync.artefacts:
        return None
    from podwatch.sync.upload.artifacts import Artifacts  # a daemon without a store does not need it

    writer_id = parts.run.file.current.writer_id

    def opened() -> ObjectStore:
        url, known = settings.sync.store, features_of(parts.run.journal.sync, settings.sync.store)
        return open_store(url, credentials_for(parts.settings), writer_id=writer_id, connections=1, features=known)

    sources = _OwnArtefacts(parts, config, syncer)
    return Artifacts(opened, keys_for(settings.sync.store, settings.run_id), sources, parts.run.clock)


def start_of(loaded: LoadedSettings) -> "Start":
    """What a bare pod needs to know of the configuration in force. Blocks on the disk."""
    from podwatch.sync.runs.bootstrap import Start
    from podwatch.sync.upload.artifacts import CONFIG_BYTES

    settings, trainer = loaded.settings, loaded.settings.trainer
    cwd = working_directory(settings)
    named = [
        path for argv in (trainer.command, *trainer.start_before, *trainer.stop_also) for path in _files(argv, cwd)
    ]
    secret: dict[str, tuple[str, ...]] = {}
    if trainer.env_file is not None:
        with contextlib.suppress(PodwatchError):
            secret[str(trainer.env_file)] = tuple(read_env_file(trainer.env_file))
    for file in (settings.notify.urls_file, settings.notify.heartbeat_urls_file, settings.http.password_file):
        if file is not None:
            with contextlib.suppress(OSError):
                lines = read_file(file, CONFIG_BYTES, shown=True).decode(errors="replace").splitlines()
                secret[str(file)] = tuple("" for line in lines if line.strip() and not line.lstrip().startswith("#"))
    given = [key for key, source in loaded.sources.items() if source in ("environment", "flag")]
    document = settings.model_dump(mode="json")
    return Start(
        settings.run_id,
        loaded.text,
        str(loaded.path or ""),
        os.environ.get(TYPED_IN) or "/",
        tuple(named),
        secret,
        {key: str(scrub_field(key, reduce(_item, key.split("."), document))) for key in sorted(given)},
    )


def _files(argv: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """The files that a command names, its own script included, without programs of the image."""
    script = argv[:1] if argv and "/" in argv[0] else ()
    found = dict.fromkeys((*named_files(argv, cwd), *named_files(("", *script), cwd)))
    return tuple(
        path for path in found if not path.startswith("/usr/") and Path(path).parent.name not in ("bin", "sbin")
    )


def _item(document: Any, name: str) -> Any:
    return document.get(name) if isinstance(document, dict) else None


class _OwnArtefacts:
    """Implements ``ArtefactSources`` over the daemon's components."""

    def __init__(self, parts: Components, config: "Reload", syncer: "Syncer") -> None:
        settings = config.loaded.settings
        self._parts, self._settings, self._config, self._syncer = parts, settings, config, syncer
        self.incidents = parts.run.paths.incidents
        self.host = socket.gethostname()
        self.log_bytes = settings.sync.artefacts_log

    def logs(self) -> Sources:
        trainer = self._settings.trainer
        globs = trainer.logs or self._parts.run.layout.log_globs()
        return Sources(trainer.output_dir, globs, (Path(self._parts.training.launcher.log_path()),))

    def configs(self) -> tuple[str, ...]:
        last = self._parts.run.file.current.last_start
        private = str(self._parts.settings.trainer.env_file or "")
        return tuple(name for name, _ in last.config_digests if name != private) if last is not None else ()

    def holds(self) -> bool:
        lease = self._syncer.status().standing
        return lease is not None and lease.publish

    def start(self) -> "list[Artefact]":
        if not self.holds():
            return []  # the files of the pod that trains stay
        from podwatch.sync.runs.bootstrap import start_artefacts

        return start_artefacts(start_of(self._config.loaded))

    def learn_secrets(self) -> None:
        credentials_for(self._parts.settings)
        self._parts.training.environment.build(self._parts.settings.trainer)

    def may_write(self) -> bool:
        return not self._syncer.status().superseded and not self._parts.run.guard.blocked_reason(Mutation.PUBLISH)

    def may_delete(self) -> bool:
        return self._parts.settings.mode == "act" and not self._parts.run.guard.blocked_reason(Mutation.DELETE)

    def trouble(self, problem: str) -> None:
        text = f"cannot upload logs and incident bundles: {problem}"
        self._parts.run.emit(Event(EventName.SYNC_FAILED, self._parts.run.clock.wall(), text))
