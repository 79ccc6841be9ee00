"""Builds the upload of configuration, logs and incident bundles from the daemon's components. Starts nothing."""

import os
import socket
from pathlib import Path

from podwatch.config.settings import Settings
from podwatch.daemon.environment import credentials_for
from podwatch.daemon.wiring import Components
from podwatch.domain.event import Event, EventName
from podwatch.domain.mutation_guard import Mutation
from podwatch.domain.secrets import secret_values
from podwatch.sensors.log_tail import Sources
from podwatch.stores.base import ObjectStore
from podwatch.stores.open import open_store
from podwatch.sync.syncer import Syncer
from podwatch.sync.upload.artifacts import Artifacts
from podwatch.sync.upload.job import keys_for

TELLING = frozenset(
    {EventName.INCIDENT_OPENED, EventName.GAVE_UP, EventName.TRAINER_CONFIRMED, EventName.TRAINER_FINISHED}
)
"""Events after which an upload is due soon: there is a new bundle, a new start, or a last log line."""


def make_artifacts(parts: Components) -> Artifacts | None:
    """None without a store, or where ``sync.artefacts`` is off."""
    settings, syncer = parts.settings, parts.syncer
    if syncer is None or not settings.sync.artefacts:
        return None
    writer_id = str(parts.run.journal.sync.learned(WRITER_ID, ""))

    def opened() -> ObjectStore:
        return open_store(settings.sync.store, credentials_for(parts.settings), writer_id=writer_id, connections=1)

    sources = _OwnArtefacts(parts, settings, syncer)
    return Artifacts(opened, keys_for(settings.sync.store, settings.run_id), sources, parts.run.clock)


class _OwnArtefacts:
    """Implements ``ArtefactSources`` over the daemon's components."""

    def __init__(self, parts: Components, settings: Settings, syncer: Syncer) -> None:
        self._parts, self._settings, self._syncer = parts, settings, syncer
        self.incidents = parts.run.paths.incidents
        self.host = socket.gethostname()
        self.log_bytes = settings.sync.artefacts_log

    def logs(self) -> Sources:
        trainer = self._settings.trainer
        globs = trainer.logs or self._parts.run.layout.log_globs()
        return Sources(trainer.output_dir, globs, (Path(self._parts.training.launcher.log_path()),))

    def configs(self) -> tuple[str, ...]:
        record = self._parts.training.record.current
        last = record.last_start if record is not None else None
        private = str(self._parts.settings.trainer.env_file or "")
        return tuple(name for name, _ in last.config_digests if name != private) if last is not None else ()

    def secrets(self) -> frozenset[str]:
        key = credentials_for(self._parts.settings)
        own = frozenset({key.key, key.key_id}) if key is not None else frozenset[str]()
        return own | secret_values({**os.environ, **self._parts.recovery.context.tools.pod.environment()})

    def may_write(self) -> bool:
        return not self._syncer.status().superseded and not self._parts.run.guard.blocked_reason(Mutation.PUBLISH)

    def may_delete(self) -> bool:
        return self._parts.settings.mode == "act" and not self._parts.run.guard.blocked_reason(Mutation.DELETE)

    def trouble(self, problem: str) -> None:
        text = f"cannot upload logs and incident bundles: {problem}"
        self._parts.run.emit(Event(EventName.SYNC_FAILED, self._parts.run.clock.wall(), text))


WRITER_ID = "writer_id"
"""Journal key, written when the components are built."""
