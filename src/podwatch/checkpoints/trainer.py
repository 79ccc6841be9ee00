"""All that podwatch knows of one trainer: its entry in ``layouts.toml``, or the same from an installed package."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any, ClassVar

from podwatch.checkpoints.command_table import CommandTable, Names
from podwatch.checkpoints.table import Globs, TrainerTable, table_from
from podwatch.domain import trainer_log
from podwatch.domain.document import Document
from podwatch.domain.errors import ConfigurationError, IntegrityError
from podwatch.domain.process import NO_PROCESSES, ProcessNames
from podwatch.domain.trainer_log import NO_LINES, TrainerLog


@dataclass(frozen=True, slots=True)
class DiskSign:
    """What output_dir shows: one of the newest steps fits, or a name exists."""

    holds: tuple[Globs, ...] = ()
    """Of each list one matches a name in the step, or one directory deeper. Empty: any step."""
    lacks: Globs = ()
    """Names that the step must not have."""
    beside: str = ""
    """A file beside the step."""
    exists: str = ""
    """A glob of names in output_dir, in the place of a step."""
    certain: bool = True
    """No other trainer writes this."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Where vLLM and transformers can load the model of a checkpoint.

    ``places``: directories with Hugging Face files, relative to the step's directory ("." is that directory, "{step}"
    the step); the first that exists counts. ``convert``: a command that makes such files in a new directory TARGET from
    the checkpoint directory CHECKPOINT; empty: none is known that fits every model. ``note``: what else is needed."""

    places: tuple[str, ...] = ()
    convert: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Trainer(Document):
    """``tables``: its table of files, then those of its other versions; one of them applies (``Layout.table``)."""

    FILE: ClassVar[str] = "layouts.toml"
    ONLY_KNOWN: ClassVar[bool] = True

    name: str
    tables: Mapping[str, TrainerTable] = field(default_factory=dict)
    command: CommandTable = field(default_factory=CommandTable)
    disk: tuple[DiskSign, ...] = ()
    log: TrainerLog = NO_LINES
    """The lines of the trainer's log."""
    processes: ProcessNames = NO_PROCESSES
    weights: Weights = field(default_factory=Weights)
    """The model for inference."""

    @property
    def facts(self) -> TrainerTable:
        """What all its tables have in common."""
        return self.tables[self.name]


_NOT_FILES = ("command", "disk", "log", "processes", "weights")


def trainer_from(
    name: str, values: Mapping[str, Any], versions: Mapping[str, Mapping[str, Any]] | None = None
) -> Trainer:
    """A trainer as TOML has it. ``versions``: the tables of its other versions, whole. Raises ConfigurationError."""
    own = {key: value for key, value in values.items() if key not in _NOT_FILES}
    tables = {name: own, **(versions or {})} if own else {}
    if own.get("hook") == "prime-rl" and not versions:
        raise ConfigurationError(f'layout {name}: hook = "prime-rl" is prime-rl\'s own', where=name)
    try:
        rest: dict[str, Any] = {key: values[key] for key in _NOT_FILES if key in values and key != "command"}
        rest["disk"] = [_with_lists(sign) for sign in rest.get("disk", ())]
        if "log" in rest:
            errors = [{**rule, "pattern": _expanded(rule["pattern"])} for rule in rest["log"].get("errors", ())]
            rest["log"] = {**rest["log"], "errors": errors}
        return replace(
            Trainer.from_json({"name": name, **rest}, where=name),
            tables={key: table_from(key, table) for key, table in tables.items()},
            command=CommandTable.from_json(_whole_rules(values.get("command", {})), where=name),
        )
    except IntegrityError as error:
        raise ConfigurationError(f"layout {name}: {error.what}", where=name, fix=error.fix) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a table that an operator or a package wrote
        raise ConfigurationError(f"layout {name}: its table has another shape ({error!r})", where=name) from error


def _whole_rules(command: Mapping[str, Any]) -> dict[str, Any]:
    """The variants of a command remove the same settings as the trainer's own rule, where they say nothing else."""
    removed = {key: names for key, names in command.get("resume", {}).items() if key.startswith("drop")}
    variants = [{**v, "resume": {**removed, **v["resume"]}} for v in command.get("variants", ())]
    return {**command, "variants": variants}


def _with_lists(sign: Mapping[str, Any]) -> dict[str, Any]:
    return {**sign, "holds": [[one] if isinstance(one, str) else one for one in sign.get("holds", ())]}


def _expanded(pattern: str) -> str:
    for name in ("STAMP", "BAD", "NEAR", "RAISED"):
        pattern = pattern.replace(f"%{name}%", getattr(trainer_log, name))
    return pattern


@cache
def all_trainers() -> Mapping[str, Trainer]:
    """The trainers of ``layouts.toml`` by name. ``like`` takes over what a table does not say itself; a table without a
    command is another version of the trainer that it is like."""
    raw: dict[str, dict[str, Any]] = tomllib.loads(files(__package__).joinpath("layouts.toml").read_text())

    def whole(name: str) -> dict[str, Any]:
        own = {key: value for key, value in raw[name].items() if key != "like"}
        base = raw[name].get("like", "")
        return {**{k: v for k, v in whole(base).items() if k not in _NOT_FILES}, **own} if base else own

    def trainer_of(name: str) -> str:
        return name if "command" in raw[name] else trainer_of(raw[name]["like"])

    versions = {name: whole(name) for name in raw if "command" not in raw[name]}
    return {
        name: trainer_from(name, whole(name), {v: t for v, t in versions.items() if trainer_of(v) == name})
        for name in raw
        if "command" in raw[name]
    }


def resume_settings(*, bare: bool = False) -> Names:
    """Every setting by which any trainer resumes."""
    commands = [trainer.command for trainer in all_trainers().values()]
    rules = [rule for c in commands for rule in (c.resume, *(v.resume for v in c.variants))]
    return tuple(dict.fromkeys(name for rule in rules for name in (rule.drop_bare if bare else rule.drop)))
