"""The environment that training is started with."""

import os

from podwatch.config.settings import TrainerSettings
from podwatch.trainer.environment import as_given, build_environment


class TrainingEnvironment:
    """``heartbeat_url`` is the base of the trainer's progress pings: set while HTTP is served, else empty."""

    def __init__(self, token: str) -> None:
        self.token, self.heartbeat_url = token, ""

    def build(self, trainer: TrainerSettings) -> dict[str, str]:
        """Reads the env_file: blocks. The values can be secrets; only names are recorded."""
        built = build_environment(as_given(os.environ), trainer.env, trainer.env_file, user=trainer.user)
        if self.heartbeat_url:
            built["PODWATCH_HEARTBEAT_URL"] = f"{self.heartbeat_url}/heartbeat/{self.token}/trainer"
            built["PODWATCH_HEARTBEAT_ORCHESTRATOR_URL"] = f"{self.heartbeat_url}/heartbeat/{self.token}/orchestrator"
        return built
