"""The configuration in force: settings, the policies that follow from them, and what a reload changes of them.

And what a run is given besides its settings: the secrets in its files, which the scrubber must know before anything is
shown.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podwatch.app.notifications import all_urls, heartbeat_urls
from podwatch.checkpoints.command_table import command_of
from podwatch.checkpoints.prime_rl import steps_in_use
from podwatch.checkpoints.shapes import Concern
from podwatch.checkpoints.trainers import restart_concerns, site_of, trainer_logs
from podwatch.config.env_files import claim_own, read_env_file
from podwatch.config.loading import ETC, LoadedSettings, load_settings
from podwatch.config.reload_limits import refused_by_reload, waits_for_restart
from podwatch.config.settings import HttpSettings, Policies, Settings
from podwatch.config.trusted_files import read_trusted
from podwatch.detection.log_rules import effective
from podwatch.disk.prune import RemovalRules
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.secrets import register
from podwatch.domain.trainer_log import LogRule
from podwatch.recording.recorder import Recorder
from podwatch.store.objects.access import access_for
from podwatch.system.blocking_calls import Worker

if TYPE_CHECKING:
    from podwatch.app.build import Components
    from podwatch.app.status_view import StatusSource

LoadAgain = Callable[[], LoadedSettings]
"""Loads the settings at a reload; None: the same file, with the environment."""


@dataclass(slots=True)
class Configuration:
    """What is in force now. A reload replaces the contents."""

    settings: Settings
    policies: Policies
    concerns: tuple[Concern, ...]
    """Reasons why a restart would fail, as far as they are known before the first one."""
    problem: str = ""
    """Why the file is not in force; empty if it is."""

    def use(self, settings: Settings) -> None:
        """Replace the settings by those of a reload."""
        known, self.problem = self.policies, ""
        self.settings = settings
        self.policies = policies_from(settings, max_steps=known.max_steps, save_interval=known.save_interval_steps)

    @property
    def removal_rules(self) -> RemovalRules:
        return RemovalRules(
            self.settings.disk,
            steps_in_use=self.policies.steps_in_use,
            acts=self.settings.mode == "act",
            quota=self.settings.disk.capacity is not None,
        )


def policies_from(settings: Settings, *, max_steps: int | None, save_interval: int | None = None) -> Policies:
    """The policies of ``settings``. ``max_steps`` is the target that the layout read from the command; an explicit
    setting wins. ``save_interval``: steps between two saves, from the command."""
    target, nodes = settings.trainer.max_steps or max_steps, settings.nodes
    rules = [LogRule(**dict(rule)) for rule in settings.log_rules]
    return Policies(
        gpu=settings.gpu,
        inference=settings.inference,
        hang=settings.hang,
        disk=settings.disk,
        resources=settings.resources,
        training=settings.training,
        startup_patience=settings.trainer.startup_patience,
        nofile=settings.trainer.nofile,
        log_rules=effective(rules, trainer_logs(settings)),
        max_steps=target,
        save_interval_steps=save_interval,
        steps_in_use=steps_in_use(command_of(site_of(settings))),
        # The logs of the other nodes rarely show steps; without a target, all nodes end together only at the end.
        clean_exit_finishes=nodes.several and (bool(nodes.rank) or target is None),
    )


def learn_secrets(settings: Settings) -> None:
    """Register the secrets of env_file, store, notification URLs and training command: an adopted trainer logs them
    before podwatch uses these files. Unreadable files are reported by the components that need them. Blocks. The S3
    credentials that the service's environment file gave to podwatch become podwatch's alone (docs/store.md)."""
    trainer = settings.trainer
    claim_own(os.environ, sorted(ETC.glob("*.env")))
    with _unless_unreadable():
        if trainer.env_file is not None:
            read_env_file(trainer.env_file)
    with _unless_unreadable():
        access_for(settings)
    with _unless_unreadable():
        all_urls(settings.notify)
    with _unless_unreadable():
        heartbeat_urls(settings.notify)
    with _unless_unreadable():
        http_password(settings.http)
    _ = command_of(site_of(settings)).files


LEAST_PASSWORD = 16
"""Characters of the HTTP password: too many to try, however often."""


def http_password(settings: HttpSettings) -> str:
    """The password in ``password_file``, registered with the scrubber; empty if no file is set. Raises
    ConfigurationError. Blocks."""
    path = settings.password_file
    if path is None:
        return ""
    password = read_trusted(path, "the HTTP password", secret=True).strip()
    register(password)
    if len(password) < LEAST_PASSWORD or not password.isprintable():
        raise ConfigurationError(
            f"Invalid HTTP password (expected one line of at least {LEAST_PASSWORD} characters)",
            where=str(path),
            fix=f"(umask 077; openssl rand -hex 16 > {path}), and restart podwatch",
        )
    return password


@contextmanager
def _unless_unreadable() -> Iterator[None]:
    try:
        yield
    except (PodwatchError, OSError):
        return


# -- a reload --------------------------------------------------------------------------------------------------------


class Reload:
    """A reload of the configuration. ``load_again`` reads it; ``loaded`` is the one in force."""

    def __init__(
        self,
        parts: "Components",
        loaded: LoadedSettings,
        load_again: LoadAgain | None,
        status: "StatusSource",
        recorder: Recorder | None,
    ) -> None:
        self._parts, self._status, self._recorder = parts, status, recorder
        self.loaded, self._load_again = loaded, load_again

    def on_signal(self) -> None:
        self._parts.foundation.tasks.spawn(self.now(), "reload")

    async def now(self) -> str:
        """Reload the configuration file; returns the result as text. Changes that need a restart are refused."""
        systemd = self._parts.foundation.systemd
        systemd.reloading()
        try:
            return await self._now()
        finally:  # in any case: without READY systemd allows no further reload
            systemd.ready(self._status.headline())

    async def _now(self) -> str:
        reading = Worker("configuration")
        try:
            new = await reading.call(self._read)
        except Exception as error:  # whatever a file contains must not end the guard
            self._parts.run.config.problem = str(error)
            text = f"configuration not reloaded, the old one stays in force: {error}"
            self._parts.bus.say(EventName.CONFIG_REFUSED, text, Severity.WARNING)
            return text
        finally:
            reading.close()
        later = waits_for_restart(self.loaded.settings, new.settings)
        self.loaded = new
        self._use(new.settings)
        text = "configuration reloaded; new thresholds and policies are in force"
        if later:
            text += f". These take effect at the next start of podwatch: {', '.join(later)}"
        self._parts.bus.say(EventName.CONFIG_RELOADED, text)
        return text

    def _read(self) -> LoadedSettings:
        """Blocks. Raises PodwatchError for what cannot be taken over."""
        new = self._load_again() if self._load_again else load_settings(self.loaded.path, environ=os.environ)
        learn_secrets(new.settings)
        if blocked := refused_by_reload(self.loaded.settings, new.settings):
            raise ConfigurationError(
                f"{', '.join(blocked)} cannot change while podwatch runs",
                where=str(new.path),
                fix="restart podwatch; training continues",
            )
        return new

    def _use(self, settings: Settings) -> None:
        parts, config = self._parts, self._parts.run.config
        config.use(settings)
        parts.pruner.rules = config.removal_rules
        parts.sensors.logs.configure(config.policies.log_rules)
        if self._recorder is not None:
            self._recorder.cut()
        parts.recovery.reconfigure(settings, config.policies)
        parts.foundation.tasks.spawn(self._judge_restart(), "restart concerns")

    async def _judge_restart(self) -> None:
        """Update the reasons why a restart would fail with the current settings."""
        parts = self._parts
        concerns = await parts.foundation.disk.call(restart_concerns, parts.settings, parts.run.layout)
        parts.run.config.concerns = concerns
