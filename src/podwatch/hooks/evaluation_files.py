"""The directory of the evaluations: made, emptied and read. Everything here blocks.

``[evaluation] dir`` is the operator's and can contain other things, so podwatch writes and deletes only in a directory
with a name of its own there. The way to it must be closed to other users, links included, and podwatch checks its owner
before it deletes anything.
"""

import contextlib
import json
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from podwatch.config.settings import EvaluationSettings
from podwatch.config.trusted_files import check_trusted
from podwatch.domain.errors import ConfigurationError, HostError
from podwatch.domain.times import size
from podwatch.hooks import evaluations_due
from podwatch.system.files import DIRECTORY_FLAGS, Removed, remove_entry

RESULT_BYTES: Final = 4 << 20
MOST_ENTRIES: Final = 2000
_PREFIX: Final = "step-"


def place_of(settings: EvaluationSettings, state: Path, run_id: str) -> Path:
    """The directory of outputs and of fetched checkpoints; podwatch's own, whatever else is beside it. ``state``: the
    run's state directory."""
    return state / "evaluation" if settings.dir is None else settings.dir / f"podwatch-evaluation-{run_id}"


def make(place: Path, step: int, user: str) -> Path:
    """The directory of one evaluation, which contains the empty directories ``output``, of ``user`` if it is not empty,
    and ``checkpoint``. ``user`` can enter all of them and write to ``output`` only. Raises HostError and OSError."""
    owner = _owner(user)
    mode = 0o700 if owner is None else 0o711
    _check(next(path for path in (place, *place.parents) if os.path.lexists(path)), shared=True)
    place.parent.mkdir(mode=mode, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    name = f"{_PREFIX}{step}"
    with _opened(place) as directory:
        os.fchmod(directory, mode)  # the umask may have removed bits, and user may be new
        _remove(directory, name)
        os.mkdir(name, 0o700, dir_fd=directory)
        work = os.open(name, DIRECTORY_FLAGS, dir_fd=directory)
        try:
            os.mkdir("checkpoint", mode, dir_fd=work)
            os.mkdir("output", 0o700, dir_fd=work)
            if owner is not None:
                os.chmod("checkpoint", mode, dir_fd=work)
                os.chown("output", *owner, dir_fd=work, follow_symlinks=False)
                os.fchmod(work, mode)  # last: until now only podwatch can enter it
        finally:
            os.close(work)
    return place / name


def remove(place: Path, step: int) -> None:
    """Delete the directory of one evaluation. Raises HostError and OSError."""
    with _opened(place) as directory:
        _remove(directory, f"{_PREFIX}{step}")


def clean(place: Path) -> None:
    """Delete what an interrupted podwatch left. Raises HostError and OSError."""
    with _opened(place) as directory:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(_PREFIX)]
        for name in names:
            _remove(directory, name)


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[int]:
    """A descriptor of ``place``, which is podwatch's own directory. Raises HostError, and OSError for a link."""
    _check(place)
    directory = os.open(place, DIRECTORY_FLAGS)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            fix = "remove it, or set [evaluation] dir to another directory"
            raise HostError("the directory of the evaluations belongs to another user", where=str(place), fix=fix)
        yield directory
    finally:
        os.close(directory)


def _check(place: Path, *, shared: bool = False) -> None:
    """HostError if another user could lead podwatch to another directory."""
    try:
        check_trusted(place, "the directory of the evaluations", shared=shared)
    except ConfigurationError as error:
        raise HostError(error.what, where=str(place), fix=f"{error.fix}, or change [evaluation] dir") from error


def _remove(directory: int, name: str) -> None:
    """Links below it are removed, not followed."""
    remove_entry(directory, name, name, os.fstat(directory).st_dev, Removed(), lambda _: None)


def _owner(user: str) -> tuple[int, int] | None:
    if not user:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise HostError(f"user {user!r} not found", where="[evaluation] user", fix="correct it") from error
    return entry.pw_uid, entry.pw_gid


# -- results ---------------------------------------------------------------------------------------------------------


def metrics_of(output: Path, tail: str) -> dict[str, float]:
    """The numbers of results.json, else of the newest results*.json below ``output``, else of the last line of the
    command's output. Raises ValueError if the file is no JSON."""
    for path in (output / "results.json", *_newest_first(output)):
        text = _read(path)
        if text is not None:
            return evaluations_due.flatten(json.loads(text))
    for line in reversed(tail.splitlines()):
        if line.strip():
            with contextlib.suppress(ValueError, RecursionError):
                return evaluations_due.flatten(json.loads(line))
            return {}
    return {}


def _newest_first(output: Path) -> Iterator[Path]:
    found: list[tuple[float, Path]] = []
    seen = 0
    with contextlib.suppress(RecursionError):  # a tree that is hundreds deep: what is above that counts
        for root, _, names in os.walk(output):
            for name in names:
                seen += 1
                if seen > MOST_ENTRIES:
                    break
                if name.startswith("results") and name.endswith(".json"):
                    path = Path(root, name)
                    with contextlib.suppress(OSError):
                        found.append((path.lstat().st_mtime, path))
    yield from (path for _, path in sorted(found, reverse=True))


def _read(path: Path) -> str | None:
    """The text of a regular file; None if it is none. A link or a pipe of the command is not followed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            return None
        if about.st_size > RESULT_BYTES:
            raise ValueError(f"{path.name} is larger than {size(RESULT_BYTES)}")
        return file.read(RESULT_BYTES).decode("utf-8", "replace")
