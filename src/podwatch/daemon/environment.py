"""What a run is given besides its settings: the environment of a start of training, the store's key, and the secrets in
its files, which the scrubber must know before anything is shown."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podwatch.checkpoints.layouts.command_line import toml_documents
from podwatch.config.settings import Settings
from podwatch.daemon.configuration import Configuration
from podwatch.daemon.notifications import all_urls, heartbeat_urls
from podwatch.domain.errors import PodwatchError
from podwatch.stores.credentials import Credentials, credentials_from_environment
from podwatch.trainer.environment import build_environment, read_env_file


def learn_secrets(settings: Settings) -> None:
    """Register the secrets of env_file, store, notification URLs and training command: an adopted trainer logs them
    before podwatch uses these files. Unreadable files are reported by the components that need them. Blocks."""
    trainer = settings.trainer
    with _unless_unreadable():
        if trainer.env_file is not None:
            read_env_file(trainer.env_file)
    with _unless_unreadable():
        credentials_for(settings)
    with _unless_unreadable():
        all_urls(settings.notify)
    with _unless_unreadable():
        heartbeat_urls(settings.notify)
    toml_documents(trainer.command, trainer.cwd or trainer.output_dir.parent)


def credentials_for(settings: Settings) -> Credentials | None:
    """The store's key, read again at each call and registered with the scrubber."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return credentials_from_environment(os.environ, settings.trainer.env_file, Path(directory) if directory else None)


@contextmanager
def _unless_unreadable() -> Iterator[None]:
    try:
        yield
    except (PodwatchError, OSError):
        return


class TrainingEnvironment:
    """The environment of a start of training. ``heartbeat_url`` is the base of its progress pings: set while HTTP is
    served, else empty."""

    def __init__(self, config: Configuration, token: str) -> None:
        self._config, self.token = config, token
        self.heartbeat_url = ""

    def build(self) -> dict[str, str]:
        """Reads the env_file: blocks. The values can be secrets."""
        trainer = self._config.settings.trainer
        built = build_environment(os.environ, trainer.env, trainer.env_file, user=trainer.user)
        if self.heartbeat_url:
            built["PODWATCH_HEARTBEAT_URL"] = f"{self.heartbeat_url}/heartbeat/{self.token}/trainer"
            built["PODWATCH_HEARTBEAT_ORCHESTRATOR_URL"] = f"{self.heartbeat_url}/heartbeat/{self.token}/orchestrator"
        return built
