"""Rounds that store configuration, logs and incident bundles: periodically, after an incident, at the end.

A failure here is only reported once: the upload of checkpoints says what is wrong with the store.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podwatch.app.backup.backup import Backup
from podwatch.app.backup.evidence import LogEnds, bundles, configs
from podwatch.config.command_directory import TYPED_IN
from podwatch.config.env_files import read_env_file
from podwatch.config.loading import LoadedSettings
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import Event, EventName
from podwatch.domain.run import Mutation
from podwatch.domain.secrets import scrub_field
from podwatch.recovery.start_plan import named_files, working_directory
from podwatch.sensors.log_tail import Sources
from podwatch.store.evidence import KEEP_SECONDS, Evidence, EvidenceKeeper
from podwatch.store.objects.access import access_for
from podwatch.store.objects.base import Objects
from podwatch.store.runs.start import RunStart, start_evidence
from podwatch.store.runs.start_record import MOST_BYTES
from podwatch.system.blocking_calls import Worker
from podwatch.system.files import read_file

if TYPE_CHECKING:
    from podwatch.app.build import Components
    from podwatch.app.settings_in_force import Reload

TELLING = frozenset(
    {EventName.INCIDENT_OPENED, EventName.GAVE_UP, EventName.TRAINER_CONFIRMED, EventName.TRAINER_FINISHED}
)
"""Events after which a round is due soon: there is a new bundle, a new start, or a last log line."""
TIDY_SECONDS = 86400.0
ROUND_SECONDS = 300.0
"""A round that takes longer is abandoned: its thread hangs on a disk or a network."""
LAST_SECONDS = 3.0
"""How long podwatch waits for the last round when it stops."""
SETTLE_SECONDS = 20.0
"""Delay after an incident: by then the bundle is written and the stopped trainer has written its last lines."""


class PostMortem:
    """Loop-side object."""

    def __init__(self, parts: "Components", config: "Reload", backup: Backup) -> None:
        settings = config.loaded.settings
        self._parts, self._settings, self._config, self._backup = parts, settings, config, backup
        self._disk = Worker("evidence of this pod")
        self._logs = LogEnds(settings.sync.artefacts_log)
        self._soon: asyncio.Task[None] | None = None
        self._keeper: EvidenceKeeper | None = None
        self._tidied: float | None = None
        self._leaving = False
        self.problem = ""
        """Why the last round did not send everything; empty if it did."""

    async def store(self, *, within: float = ROUND_SECONDS) -> None:
        """One round. Raises only CancelledError."""
        if not self._backup.lease.may_upload or self._parts.run.guard.blocked_reason(Mutation.PUBLISH):
            return
        before, self.problem = self.problem, ""
        try:
            async with asyncio.timeout(within):
                found = await self._disk.call(self._collect)
                await self._backup.connection.call(lambda store: self._put(store, found))
        except Exception as error:  # sending evidence must never stop the guard
            if self._leaving:
                return
            self.problem = str(error)[:500] or type(error).__name__
            self._keeper = None
        if self.problem and not before:
            text = f"cannot upload logs and incident bundles: {self.problem}"
            self._parts.run.emit(Event(EventName.SYNC_FAILED, self._parts.run.clock.wall(), text))

    async def when_held(self) -> None:
        """One round once this pod holds the run: from then on another pod can start it, whatever happens here."""
        while not self._backup.lease.holds:
            await self._backup.lease.turned()
        await self.store()

    def soon(self, after: float = SETTLE_SECONDS) -> None:
        """Schedule a round shortly after an event. Several calls make one round."""
        if self._soon is None or self._soon.done():
            self._soon = asyncio.create_task(self._shortly(after), name="evidence soon")

    async def _shortly(self, after: float) -> None:
        await asyncio.sleep(after)
        await self.store()

    async def stop(self, *, last: bool) -> None:
        """``last``: run a last round first, for at most a few seconds."""
        if self._soon is not None:
            self._soon.cancel()
        self._leaving = True
        if last:
            await self.store(within=LAST_SECONDS)
        self._disk.close()

    # -- in threads

    def _collect(self) -> list[Evidence]:
        """What this pod has; nothing where its secrets cannot be known."""
        access_for(self._parts.settings)
        self._parts.training.environment.build(self._parts.settings.trainer)
        found = configs(self._configs())
        if self._backup.lease.holds:  # else the files of the pod that trains stay
            found += start_evidence(start_of(self._config.loaded))
        known = () if self._keeper is None else [key.rpartition("/")[2] for key in self._keeper.sent]
        found += bundles(self._parts.run.paths.incidents, known, time.time() - KEEP_SECONDS)
        return [*found, *self._logs.read(self._sources(), socket.gethostname())]

    def _put(self, store: Objects, found: Sequence[Evidence]) -> None:
        if self._keeper is None:
            self._keeper = EvidenceKeeper(store, self._backup.connection.keys)
        self._keeper.store = store
        self._keeper.put(found)
        due = self._tidied is None or time.monotonic() - self._tidied >= TIDY_SECONDS
        deletes = self._settings.mode == "act" and not self._parts.run.guard.blocked_reason(Mutation.DELETE)
        if due and deletes and self._backup.lease.holds:
            self._keeper.tidy({one.name for one in found if one.kind == "config"})
            self._tidied = time.monotonic()

    def _sources(self) -> Sources:
        trainer = self._settings.trainer
        globs = trainer.logs or self._parts.run.layout.log_globs()
        return Sources(trainer.output_dir, globs, (Path(self._parts.training.launcher.log_path()),))

    def _configs(self) -> tuple[str, ...]:
        last = self._parts.run.file.current.last_start
        private = str(self._parts.settings.trainer.env_file or "")
        return tuple(name for name, _ in last.config_digests if name != private) if last is not None else ()


def make_post_mortem(parts: "Components", config: "Reload") -> PostMortem | None:
    """None without a store, or where ``sync.artefacts`` is off."""
    if parts.backup is None or not parts.settings.sync.artefacts:
        return None
    return PostMortem(parts, config, parts.backup)


def start_of(loaded: LoadedSettings) -> RunStart:
    """What a bare pod needs to know of the configuration in force. Blocks on the disk."""
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
                lines = read_file(file, MOST_BYTES, shown=True).decode(errors="replace").splitlines()
                secret[str(file)] = tuple("" for line in lines if line.strip() and not line.lstrip().startswith("#"))
    given = [key for key, source in loaded.sources.items() if source in ("environment", "flag")]
    document = settings.model_dump(mode="json")
    return RunStart(
        settings.run_id, loaded.text, str(loaded.path or ""), os.environ.get(TYPED_IN) or "/", tuple(named), secret,
        {key: str(scrub_field(key, reduce(_item, key.split("."), document))) for key in sorted(given)},
    )  # fmt: skip


def _files(argv: Sequence[str], cwd: Path) -> tuple[str, ...]:
    """The files that a command names, its own script included, without programs of the image."""
    script = argv[:1] if argv and "/" in argv[0] else ()
    found = dict.fromkeys((*named_files(argv, cwd), *named_files(("", *script), cwd)))
    return tuple(
        path for path in found if not path.startswith("/usr/") and Path(path).parent.name not in ("bin", "sbin")
    )


def _item(document: Any, name: str) -> Any:
    return document.get(name) if isinstance(document, dict) else None
