"""The configuration in force: settings, the policies that follow from them, and what a reload changes of them.

And what a run is given besides its settings: the secrets in its files, which the scrubber must know before anything is
shown.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from podwatch.app.notifications import all_urls, heartbeat_urls
from podwatch.checkpoints.command_table import command_of
from podwatch.checkpoints.prime_rl import steps_in_use
from podwatch.checkpoints.shapes import Concern
from podwatch.checkpoints.trainers import site_of, trainer_logs
from podwatch.config.env_files import claim_own, read_env_file
from podwatch.config.loading import ETC
from podwatch.config.settings import HttpSettings, Policies, Settings
from podwatch.config.trusted_files import read_trusted
from podwatch.detection.log_rules import effective
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.secrets import register
from podwatch.domain.trainer_log import LogRule
from podwatch.store.objects.access import access_for


@dataclass(slots=True)
class Configuration:
    """What is in force now. A reload replaces the contents."""

    settings: Settings
    policies: Policies
    concerns: tuple[Concern, ...]
    """Reasons why a restart would fail, as far as they are known before the first one."""
    problem: str = ""
    """Why the file is not in force; empty if it is."""


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
