"""Read the files that a keeper writes (keeper.py, "Files in DIRECTORY")."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from podwatch.domain.process import ExitStatus, ProcessIdentity
from podwatch.system.files import fsync_dir, read_small


@dataclass(frozen=True, slots=True)
class KeeperRecord:
    """``record.json``: the started trainer and its keeper. ``directory`` is the keeper's."""

    directory: Path
    run_id: str
    start_id: str
    keeper: ProcessIdentity
    launcher: ProcessIdentity
    argv: tuple[str, ...]
    started_wall: float
    log: str
    warnings: tuple[str, ...] = ()

    @property
    def executed(self) -> bool:
        """Whether the command was executed; False if the keeper died before that."""
        return (self.directory / f"executed-{self.start_id}").exists()


def read_record(directory: Path) -> KeeperRecord | None:
    """Return the record; None if there is none, or it is malformed."""
    value = _read(directory / "record.json")
    if value is None:
        return None
    try:
        boot, namespace = str(value["boot_id"]), int(str(value["pid_namespace"]))
        argv, warnings = value["argv"], value.get("warnings", [])
        if not isinstance(argv, list) or not isinstance(warnings, list):
            return None
        return KeeperRecord(
            directory=directory,
            run_id=str(value["run_id"]),
            start_id=str(value["start_id"]),
            keeper=ProcessIdentity(int(str(value["keeper"])), int(str(value["keeper_ticks"])), boot, namespace),
            launcher=ProcessIdentity(int(str(value["pid"])), int(str(value["ticks"])), boot, namespace),
            argv=tuple(str(word) for word in argv),
            started_wall=float(str(value["started_wall"])),
            log=str(value["log"]),
            warnings=tuple(str(word) for word in warnings),
        )
    except (KeyError, ValueError):
        return None


def read_exit(directory: Path, start_id: str) -> ExitStatus | None:
    """Return how the launcher of this start ended; None if no keeper recorded it."""
    value = _read(directory / f"exit-{start_id}.json")
    if value is None:
        return None
    code, number, at = value.get("code"), value.get("signal"), value.get("at_wall")
    return ExitStatus(
        code=code if isinstance(code, int) else None,
        signal=number if isinstance(number, int) else None,
        at_wall=at if isinstance(at, float) else 0.0,
    )


def read_end(directory: Path, start_id: str) -> float | None:
    """Return the seconds since boot at which the launcher of this start ended; None if no keeper recorded it."""
    at = (_read(directory / f"exit-{start_id}.json") or {}).get("at_boot")
    return at if isinstance(at, float) else None


def read_result(directory: Path, start_id: str) -> dict[str, object] | None:
    """Return the keeper's answer to a start; None before there is one."""
    return _read(directory / f"result-{start_id}.json")


def retire_record(directory: Path) -> None:
    """Move the record away after its trainer has ended and that was noted. A rename needs no space."""
    with contextlib.suppress(FileNotFoundError):
        (directory / "record.json").rename(directory / "record.last.json")
        fsync_dir(directory)


def _read(path: Path) -> dict[str, object] | None:
    """Return the JSON object; None if the file is missing or malformed. Raises OSError if it cannot be read, which
    proves nothing about the content."""
    try:
        value = json.loads(read_small(path))
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
