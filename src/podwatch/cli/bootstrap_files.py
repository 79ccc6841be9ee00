"""The files of a run's start on a bare pod: what would be written, where, and what is left to fill; then the writing.

``store/runs/start_record`` decides which paths are allowed. Here nothing follows a link below an allowed directory, and
nothing replaces a file that exists. Blocks on the disk.
"""

import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from podwatch.client.trusted_configuration import read_trusted
from podwatch.domain.errors import HostError
from podwatch.domain.secrets import MASK
from podwatch.store.objects.access import S3_ID, S3_KEY, S3_TOKEN
from podwatch.store.runs.start import StartTexts
from podwatch.store.runs.start_record import (
    CONFIG_NAME,
    FILL,
    MOST_BYTES,
    StartFile,
    filled,
    fits,
    placeable,
    placeholders,
)
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.system.files import atomic_write, read_file, rename_at, sync_descriptor
from podwatch.system.open_by_descriptor import open_path
from podwatch.system.pinned_directories import open_regular

# -- plan ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenPlaceholder:
    """A placeholder that nothing fills yet. ``file`` is the copy to edit, ``line`` counts from 1."""

    file: Path
    line: int
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file on its way to this pod. ``state``: ``new``, ``here`` (nothing to write), ``differs`` (another content is
    there), or ``refused`` with its ``reason``."""

    source: StartFile
    target: Path
    text: str
    state: str
    reason: str = ""
    open: tuple[OpenPlaceholder, ...] = ()


@dataclass(frozen=True, slots=True)
class BarePod:
    """Where the files of a start go. ``directory`` holds podwatch.toml, ``copies`` the copies to fill by hand;
    ``roots``: allowed directories; ``foreign``: directories of checkpoints and state."""

    directory: Path
    copies: Path
    roots: tuple[str, ...]
    foreign: tuple[str, ...] = field(default=())


def plan(fetched: StartTexts, pod: BarePod, environ: Mapping[str, str]) -> list[PlannedFile]:
    """What would be written. Reads this pod's files, changes nothing. The configuration comes first."""
    used: dict[str, int] = {}
    record = fetched.record
    return [
        _planned(source, fetched.texts[source.object], number, pod, environ, used)
        for number, source in enumerate((record.config, *record.files))
    ]


def _planned(
    source: StartFile, template: str, number: int, pod: BarePod, environ: Mapping[str, str], used: dict[str, int]
) -> PlannedFile:
    own = number == 0
    target = pod.directory / CONFIG_NAME if own else Path(source.path)
    holes = placeholders(template, target.name, secret=source.secret, used=used)
    reason = "" if own else placeable(source.path, pod.roots, (*pod.foreign, str(pod.directory / CONFIG_NAME)))
    try:
        there = _read(target)
    except OSError as error:
        return PlannedFile(source, target, "", "refused", f"{error.strerror}: {target}")
    if there is not None and (source.secret or (fits(template, there) and MASK not in there)):
        return PlannedFile(source, target, there, "here")
    if reason:
        return PlannedFile(source, target, "", "refused", reason)
    copy = pod.copies / f"{number:02d}-{target.name}"
    edited = _read_own(copy)
    if edited is not None and edited != template and fits(template, edited):
        left = placeholders(edited, target.name, secret=source.secret, used={})
        text, reasons = edited, {hole.at: "write it there: this copy was edited" for hole in left}
    else:
        left = holes
        kept = _withheld(environ)
        given = {name: value for name, value in environ.items() if name.startswith(FILL) or value not in kept}
        text, reasons = filled(template, holes, given, () if source.secret else kept)
    open_ = tuple(OpenPlaceholder(copy, hole.line, hole.key, reasons[hole.at]) for hole in left if hole.at in reasons)
    return PlannedFile(source, target, text, "new" if there is None else "differs", open=open_)


def _withheld(environ: Mapping[str, str]) -> frozenset[str]:
    """The values that only podwatch has: the store's key, its own settings. Not those that the operator gave to fill
    in, nor what is too short for a secret."""
    shown = scrubbed_environment(environ).keys() - {S3_ID, S3_KEY, S3_TOKEN}
    own = (name for name in environ if name not in shown and not name.startswith(FILL))
    return frozenset(environ[name] for name in own if len(environ[name]) >= 8)


def _read(path: Path) -> str | None:
    """The text at a path; None if nothing is there. OSError for what is no plain text file."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    try:
        return read_file(path, MOST_BYTES).decode()
    except UnicodeDecodeError:
        return "\0"  # fits no template


def _read_own(path: Path) -> str | None:
    """The copy at ``path``, None if there is none. ConfigurationError where another user can have written it."""
    return read_trusted(path) if os.path.lexists(path) else None


# -- writing ---------------------------------------------------------------------------------------------------------


def keep_copies(files: Sequence[PlannedFile], fetched: StartTexts, pod: BarePod) -> None:
    """Write the copies in which placeholders can be filled by hand; an edited copy that no longer fits what is stored
    is kept under another name."""
    pod.copies.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number, file in enumerate(files):
        copy, template = pod.copies / f"{number:02d}-{file.target.name}", fetched.texts[file.source.object]
        if not file.open:
            continue
        before = _read_own(copy)
        if before is not None and fits(template, before):
            continue
        if before is not None:
            copy.rename(copy.with_name(f"{copy.name}.{secrets.token_hex(4)}.old"))
        atomic_write(copy, template, 0o600)


def write(file: PlannedFile, roots: Sequence[str], *, replace: bool = False) -> Path | None:
    """Write one planned file with its mode. With ``replace`` a file that differs is moved to a name of its own beside
    it, which is returned. Below its root no link is followed. HostError where that fails; then nothing is changed."""
    parent = file.target.parent
    root = max((r for r in roots if file.target.is_relative_to(r)), key=len, default=str(parent))
    moved: str | None = None
    try:
        directory = _open_directory(Path(root), parent.relative_to(root).parts)
        try:
            if replace and file.state == "differs":
                moved = f"{file.target.name}.before-bootstrap-{secrets.token_hex(4)}"
            _create(
                directory,
                file.target.name,
                file.text.encode(),
                0o600 if file.source.secret else file.source.permissions,
                moved,
            )
        finally:
            os.close(directory)
    except OSError as error:
        reason = "a symbolic link is on the way" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise HostError(
            f"podwatch cannot write a file of the run: {reason}",
            where=str(file.target),
            fix="copy it there yourself (`podwatch bootstrap` without --trust keeps copies), then run this again",
        ) from error
    return parent / moved if moved is not None else None


def _open_directory(root: Path, below: Sequence[str]) -> int:
    """Links are followed only on the way to the part of ``root`` that exists, and only root's or podwatch's own."""
    missing: list[str] = []
    while not root.exists() and root != root.parent:
        missing.insert(0, root.name)
        root = root.parent
    fd, _ = open_path(root)
    try:
        for name in (*missing, *below):
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=fd)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = inner
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create(directory: int, name: str, data: bytes, mode: int, moved: str | None) -> None:
    """Whole or not at all, and never over a file that exists (FileExistsError): with ``moved`` that one gets this name
    first, once the new one is on the disk, and its own again if the new one cannot follow."""
    temporary = f".podwatch-{secrets.token_hex(8)}"
    fd = open_regular(directory, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
            os.fchmod(fd, mode)  # the umask may have removed bits
            out.flush()
            os.fsync(fd)
        if moved is not None:
            rename_at(directory, name, directory, moved)
        try:
            rename_at(directory, temporary, directory, name)
        except BaseException:
            if moved is not None:
                with suppress(OSError):
                    rename_at(directory, moved, directory, name)
            raise
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    sync_descriptor(directory)
