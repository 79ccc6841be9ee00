"""Checks before the first failure whether a restart with this configuration could resume."""

from podwatch.checkpoints.layouts import concerns
from podwatch.checkpoints.layouts.base import Concern, Layout
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError, PodwatchError

_OURS = ("trainer.resume_args", "trainer.command")
"""An error about these settings holds for every step; other errors can disappear with the first checkpoint."""


def restart_concerns(settings: Settings, layout: Layout) -> tuple[Concern, ...]:
    """Problems that the layout finds in command and directory, and whether it knows how to pass a step. Reads small
    files; can block. Empty where podwatch has no command to start."""
    trainer = settings.trainer
    if not trainer.command:
        return ()
    try:
        found = concerns(settings)
    except (PodwatchError, OSError, ValueError):
        found = ()  # an unreadable or invalid path is no reason not to start
    try:
        made = layout.resume_command(trainer.command, 1, trainer.resume_args, {})
    except ConfigurationError as error:
        # sometimes only the first checkpoint shows prime-rl's version
        if error.where in _OURS and (layout.variant or layout.name != "prime-rl"):
            what = f"a restart cannot resume: {error.what}"
            return (*found, Concern("resume", what, f"{error.where}: {error.fix}", certain=True))
    except (PodwatchError, OSError, ValueError):
        return found  # this needs a checkpoint
    else:
        if made.argv == trainer.command and trainer.resume_args not in ("auto", "none"):
            what = "a restart cannot resume: trainer.resume_args adds nothing to the command"
            return (*found, Concern("resume", what, 'set it to a list such as ["--resume", "{checkpoint}"]', True))
    return found
