"""Settings of `podwatch run --job -- command` that neither file, environment nor flags give: detected as `auto` and
`podwatch config init` do, and reported, because a wrong guess must be seen in the first lines of a job's log."""

import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from podwatch.cli.common import Where
from podwatch.domain.errors import UsageError

R = TypeVar("R")


def overrides_of(settings: Sequence[str], named: Mapping[str, object]) -> dict[str, object]:
    """What the command line gives, by dotted key; texts are converted by the loader. ``settings``: each ``--set``.
    ``named``: the options of single settings; empty if not given. UsageError for a ``--set`` without a key."""
    made: dict[str, object] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise UsageError("not a valid setting", where=f"--set {setting}", fix="write --set section.key=value")
        made[key.strip()] = value
    return made | {key: value for key, value in named.items() if value}


def given_options(function: Callable[..., R]) -> Callable[..., R]:
    """Accept these options and the words after ``--``, and pass the command ``overrides``."""

    @functools.wraps(function)
    def wrapper(
        *args: object,
        settings: tuple[str, ...],
        store: str,
        run_id: str,
        state_dir: str,
        trainer: tuple[str, ...],
        **kwargs: object,
    ) -> R:
        named = {"sync.store": store, "run_id": run_id, "state_dir": state_dir, "trainer.command": list(trainer)}
        return function(*args, overrides=overrides_of(settings, named), **kwargs)

    made: Callable[..., R] = wrapper
    for option in (
        click.argument("trainer", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED),
        click.option("--state-dir", metavar="DIR", default="", help="Directory for podwatch's state; can be empty."),
        click.option("--run-id", metavar="ID", default="", help="Name of the run here and in the store."),
        click.option("--store", metavar="URL", default="", help="Store of the checkpoints: b2://bucket, file:///path."),
        click.option(
            "--set", "settings", metavar="KEY=VALUE", multiple=True, help="Override a setting: --set disk.prune_to=70%."
        ),
    ):
        made = option(made)
    return made


@dataclass(frozen=True, slots=True)
class Assumed:
    """``lines``: what was assumed and why, one setting each."""

    overrides: Mapping[str, object]
    lines: tuple[str, ...] = ()


def assume(where: Where, overrides: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> Assumed:
    """The ``overrides``, and with a command after ``--`` also what they leave open. Reads the trainer's configuration
    and looks at the GPUs once. Raises ConfigurationError."""
    from podwatch.cli import detect_machine
    from podwatch.config.loading import given_keys

    command = overrides.get("trainer.command")
    if not isinstance(command, list):  # none after --, or a text of --set
        return Assumed(overrides)
    known = given_keys(where.path, environ=environ, overrides=overrides, run=where.run)
    trainer = detect_machine.planned_trainer(command, environ)
    proposal = detect_machine.propose(trainer, with_gpus=not {"gpu.inference", "gpu.trainer"} & known)
    notes = _NOTES | {"gpu.trainer": proposal.notes.get("gpu.inference", "")} | proposal.notes
    found = [(key, proposal.settings[key], notes[key]) for key in _DETECTED if key in proposal.settings]
    if "state_dir" not in known:
        found.append(_state_dir(environ))
    made = {key: value for key, value, _ in found if key not in known}
    lines = [f"assumed {key} = {_shown(value)} ({why})" for key, value, why in found if key not in known]
    if proposal.no_gpu:
        lines.append(f"assumed no GPU ({proposal.no_gpu})")
    if proposal.added:
        overrides = {**overrides, "trainer.command": [*command, *proposal.added]}
        words = " ".join(proposal.added)
        lines.append(f"assumed {_shown(words)} at the end of the command (else each start has a new directory)")
    return Assumed({**made, **overrides}, tuple(lines))


_DETECTED = ("run_id", "trainer.output_dir", "trainer.cwd", "gpu.inference", "gpu.trainer")
_NOTES = {
    "run_id": "from the command, W&B's settings or the directories",
    "trainer.cwd": "the current directory",
}


def _state_dir(environ: Mapping[str, str]) -> tuple[str, object, str]:
    """The default where it can be written, else a directory of this user: Slurm's users have no /var/lib."""
    from podwatch.config.settings import Settings

    usual = Path(Settings.model_fields["state_dir"].default)
    if os.access(usual if usual.exists() else usual.parent, os.W_OK):
        return "state_dir", str(usual), "the default"
    home = environ.get("XDG_STATE_HOME") or (f"{environ['HOME']}/.local/state" if environ.get("HOME") else "")
    if home and os.path.isabs(home):  # noqa: PTH117
        try:
            own = Path(home, "podwatch")
            own.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(own, os.W_OK):
                return "state_dir", str(own), f"{usual.parent} is not writable"
        except OSError:
            pass
    return "state_dir", f"{tempfile.gettempdir()}/podwatch-state-{os.getuid()}", f"{usual.parent} is not writable"


def _shown(value: object) -> str:
    from podwatch.domain.secrets import scrub

    return scrub(str(value))
