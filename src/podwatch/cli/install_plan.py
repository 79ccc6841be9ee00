"""The plan of an installation: the unit and drop-in for a configuration, the directories to create, the store's key."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.cli.systemd_service import SIGNATURE, Service, service_of, variables_of
from podwatch.domain.errors import ConfigurationError, HostError, InternalError

if TYPE_CHECKING:
    from podwatch.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Plan:
    """The changes of an installation. ``files``: (path, text); ``make``: podwatch's own directories to create."""

    service: Service
    files: tuple[tuple[Path, str], ...]
    make: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def plan_install(settings: "Settings", config: Path, command: list[str], *, name: str = "") -> Plan:
    """The plan for a configuration. With ``name`` an instance, podwatch@NAME.

    ConfigurationError or HostError if the service would fail at its first start.
    """
    service = service_of(name)
    if config.stat().st_uid != 0:
        raise ConfigurationError(
            "the service runs as root and only reads a configuration that belongs to root",
            where=str(config),
            fix=f"chown root {config}",
        )
    writable, make = writable_paths(settings)
    run = [*command, *(["--run", "%i"] if name else []), "run"]
    dropin = [
        "# From the configuration: run `podwatch install` again after a path there changes.",
        f"# Run: {settings.run_id}",
        f"# Configuration: {config}",
        "[Unit]",
        f"RequiresMountsFor={' '.join(quote(p) for p in (*writable, config))}",
        "",
        "[Service]",
        f"ReadWritePaths={' '.join(quote(p) for p in writable)}",
    ]
    if config != service.configuration:
        dropin += ["ExecStart=", f"ExecStart={exec_line([*command, '--config', str(config), 'run'])}"]
    files = (
        (service.unit_file, SIGNATURE + _with_exec(_shipped(service.shipped), exec_line(run))),
        (service.dropin, SIGNATURE + "\n".join(dropin) + "\n"),
    )
    return Plan(service, files, make, tuple(_notes(command)))


def key_for_service(settings: "Settings", service: Service, environ: Mapping[str, str]) -> dict[str, str] | None:
    """What to write into the service's key file: the key that ``environ`` (this shell's) has; empty if there is none,
    or if the file is an operator's. None where the service finds a key: in its file, the trainer's, or, for S3,
    possibly where AWS's tools look. ConfigurationError, PermissionDenied for a file that cannot be used."""
    from podwatch.config.store_kinds import kind_of

    kind = kind_of(settings.sync.store)
    if kind is None or not kind.key or _is_written(settings, variables_of(service.key_file)):
        return None
    here = {name: environ[name] for name in kind.names if environ.get(name)}
    if set(kind.key) <= here.keys() and not service.key_file.exists():
        return here
    return None if settings.sync.store.startswith("s3:") else {}


def _is_written(settings: "Settings", variables: Mapping[str, str]) -> bool:
    """Whether the key is in ``variables`` or in the trainer's environment file, or a profile is named. Raises as
    ``access_for``."""
    from podwatch.store.objects.access import access_for

    access = access_for(settings, variables)
    if access is None:
        return False
    return bool(asdict(access).get("access_key", "key") or asdict(access).get("profile"))


def writable_paths(settings: "Settings") -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The paths that the service must be able to write, without nested ones; and the directories to create first.

    The *parent* of the output directory: two sibling entries would be two mounts, and a rename between them fails with
    EXDEV. For a directory directly below /, only the directory itself and podwatch's directory beside it, because /
    would undo ProtectSystem. systemd fails the start for an entry that does not exist (status 226).
    """
    from podwatch.store.objects.open import parse_url

    wanted: list[Path] = []
    make: list[Path] = []
    trainer = settings.trainer
    for directory in filter(None, (trainer.output_dir, trainer.checkpoint_dir)):
        for path in dict.fromkeys((directory, Path(os.path.realpath(directory)))):
            if path.parent == Path("/"):
                make += [path, path.parent / ".podwatch"]
                wanted += make[-2:]
            else:
                _must_be_there(path.parent, "the directory that holds the trainer's output")
                wanted.append(path.parent)
    own = [settings.state_dir] if settings.state_dir != Path("/var/lib/podwatch") else []  # StateDirectory= creates it
    store = parse_url(settings.sync.store).path if settings.sync.store else None
    if store is not None:
        own.append(store)
    for path in own:
        if not path.exists():
            _must_be_there(path.parent, "a directory that podwatch writes to")
        make.append(path)
        wanted.append(path)
    kept = [p for p in dict.fromkeys(wanted) if not any(other in p.parents for other in wanted)]
    return tuple(kept), tuple(dict.fromkeys(make))


def exec_line(argv: list[str]) -> str:
    """An argv quoted for ``ExecStart=``, except for the specifier %i."""
    return " ".join(word if word == "%i" else quote(word.replace("$", "$$")) for word in argv)


def quote(word: str | Path) -> str:
    """A word quoted for a unit file (systemd.syntax(7)): specifiers and quotes have no effect."""
    text = str(word)
    if any(not c.isprintable() for c in text):
        raise ConfigurationError(
            f"a systemd unit cannot contain a path with control characters: {text!r}", fix="rename it"
        )
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"' if any(c in " '\"\\;" for c in text) or not text else text


def executable() -> list[str]:
    """The command of this podwatch: its script if there is one, so that the service survives an upgrade in place."""
    script = Path(sys.prefix, "bin", "podwatch")
    return [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-P", "-m", "podwatch"]


def _must_be_there(path: Path, what: str) -> None:
    if not path.is_dir():
        raise HostError(f"{what} does not exist", where=str(path), fix=f"create it (mkdir -p {path}), or mount it")


def _shipped(unit: str) -> str:
    """The unit's text, from the package or from a source checkout."""
    package = Path(__file__).parents[1]
    for directory in (package / "_systemd", package.parents[1] / "systemd"):
        if (directory / unit).is_file():
            return (directory / unit).read_text()
    raise InternalError("the unit is missing from this installation", where=unit, fix="install podwatch again")


def _with_exec(text: str, line: str) -> str:
    lines = [f"ExecStart={line}" if old.startswith("ExecStart=") else old for old in text.splitlines()]
    return "\n".join(lines) + "\n"


def _notes(command: list[str]) -> list[str]:
    try:
        owner = os.stat(command[0]).st_uid  # noqa: PTH116
    except OSError:
        owner = 0
    return [f"{command[0]} belongs to uid {owner}, who can change it and so run commands as root"] if owner else []
