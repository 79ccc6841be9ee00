"""The environment of training: podwatch's own without its secrets, then ``[trainer] env``, then ``env_file``."""

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from podwatch.config.env_files import NAME, read_env_file
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import register_named
from podwatch.system.environment_without_secrets import EXPORTED, scrubbed_environment

GIVEN_PATH = "PODWATCH_TRAINING_PYTHONPATH"
"""PYTHONPATH as the operator gave it: podwatch's own is without what others can write (``podwatch.cli``)."""


def as_given(base: Mapping[str, str]) -> Mapping[str, str]:
    """``base``, usually os.environ, with the operator's PYTHONPATH, for what runs as training does."""
    return {**base, "PYTHONPATH": base[GIVEN_PATH]} if GIVEN_PATH in base else base


def for_training(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without podwatch's own settings and secrets: the last filter before the supervisor, whatever the
    source."""
    kept = scrubbed_environment(env)
    kept.update((k, v) for k, v in env.items() if k in EXPORTED or k.startswith("PODWATCH_HEARTBEAT_"))
    return kept


def build_environment(
    base: Mapping[str, str], env: Mapping[str, str], env_file: Path | None, *, user: str = ""
) -> dict[str, str]:
    """Return ``base`` (usually os.environ) scrubbed, then ``env``, then ``env_file``; later ones win.

    With ``user`` HOME, USER, LOGNAME and SHELL are that user's unless configured; a missing HOME (systemd gives none
    to system services) is filled in. Raises ConfigurationError for a bad file or name.
    """
    result = scrubbed_environment(base)
    given = {**env, **(read_env_file(env_file) if env_file is not None else {})}
    for name, value in given.items():
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} is not a valid name for an environment variable",
                where="trainer.env",
                fix="use A-Z, 0-9 and _",
            )
        if "\0" in value:
            raise ConfigurationError(f"the value of {name} holds a NUL character", where="trainer.env", fix="remove it")
    try:
        entry = pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())
    except KeyError:
        entry = None  # the supervisor reports a user that does not exist
    if entry is not None and (user or not result.get("HOME")):
        names = {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name, "SHELL": entry.pw_shell}
        result.update({name: value for name, value in names.items() if value})
    result.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    result.update(given)
    register_named(result)
    return for_training(result)
