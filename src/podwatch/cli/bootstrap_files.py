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

from podwatch.domain.errors import HostError
from podwatch.domain.secrets import MASK
from podwatch.store.objects.access import S3_ID, S3_KEY, S3_TOKEN
from podwatch.store.runs.start import StartTexts
from podwatch.store.runs.start_record import (
    CONFIG_NAME,
    MOST_BYTES,
    Placeholder,
    StartFile,
    filled,
    fits,
    placeable,
    placeholders,
)
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.system.files import open_dir_below, read_file, rename_at, sync_descriptor, write_at
from podwatch.system.open_by_descriptor import open_path

# -- plan ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file on its way to this pod. ``state``: ``new``, ``here`` (nothing to write), ``differs`` (another content is
    there), or ``refused`` with its ``reason``. ``open``: the placeholders that nothing fills, each with what to do."""

    source: StartFile
    target: Path
    text: str
    state: str
    reason: str = ""
    open: tuple[tuple[Placeholder, str], ...] = ()


@dataclass(frozen=True, slots=True)
class BarePod:
    """Where the files of a start go. ``directory`` holds podwatch.toml; ``roots``: allowed directories; ``foreign``:
    directories of checkpoints and state."""

    directory: Path
    roots: tuple[str, ...]
    foreign: tuple[str, ...] = field(default=())


def plan(fetched: StartTexts, pod: BarePod, environ: Mapping[str, str]) -> list[PlannedFile]:
    """What would be written. Reads this pod's files, changes nothing. The configuration comes first."""
    record = fetched.record
    return [
        _planned(source, fetched.texts[source.object], pod, environ, own=number == 0)
        for number, source in enumerate((record.config, *record.files))
    ]


def _planned(source: StartFile, template: str, pod: BarePod, environ: Mapping[str, str], *, own: bool) -> PlannedFile:
    """``own``: it is the configuration."""
    target = pod.directory / CONFIG_NAME if own else Path(source.path)
    reason = "" if own else placeable(source.path, pod.roots, (*pod.foreign, str(pod.directory / CONFIG_NAME)))
    try:
        there = _read(target)
    except OSError as error:
        return PlannedFile(source, target, "", "refused", f"{error.strerror}: {target}")
    if there is not None and (source.secret or (fits(template, there) and MASK not in there)):
        return PlannedFile(source, target, there, "here")
    if reason:
        return PlannedFile(source, target, "", "refused", reason)
    holes = placeholders(template, secret=source.secret)
    text, reasons = filled(template, holes, environ, _withheld(environ))
    left = tuple((hole, reasons[hole.at]) for hole in holes if hole.at in reasons)
    return PlannedFile(source, target, text, "new" if there is None else "differs", open=left)


def _withheld(environ: Mapping[str, str]) -> frozenset[str]:
    """The values that only podwatch has: the store's key, its own settings. Not what is too short for a secret."""
    shown = scrubbed_environment(environ).keys() - {S3_ID, S3_KEY, S3_TOKEN}
    return frozenset(environ[name] for name in environ if name not in shown and len(environ[name]) >= 8)


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


# -- writing ---------------------------------------------------------------------------------------------------------


def write(file: PlannedFile, roots: Sequence[str]) -> None:
    """Write one planned file with its mode, where none exists. Below its root no link is followed. HostError where that
    fails; then nothing is changed."""
    parent = file.target.parent
    root = max((r for r in roots if file.target.is_relative_to(r)), key=len, default=str(parent))
    mode = 0o600 if file.source.secret else file.source.permissions
    try:
        directory = _open_directory(Path(root), parent)
        try:
            _create(directory, file.target.name, file.text.encode(), mode)
        finally:
            os.close(directory)
    except OSError as error:
        reason = "a symbolic link is on the way" if error.errno in (errno.ELOOP, errno.ENOTDIR) else error.strerror
        raise HostError(
            f"podwatch cannot write a file of the run: {reason}",
            where=str(file.target),
            fix="copy it there yourself (`podwatch runs show RUN --files` prints it), then run this again",
        ) from error


def _open_directory(root: Path, below: Path) -> int:
    """Links are followed only on the way to the part of ``root`` that exists, and only root's or podwatch's own."""
    there = next(path for path in (root, *root.parents) if path.exists())
    fd, _ = open_path(there)
    try:
        relative = str(below.relative_to(there))
        return open_dir_below(fd, "" if relative == "." else relative, create=True)
    finally:
        os.close(fd)


def _create(directory: int, name: str, data: bytes, mode: int) -> None:
    """Whole or not at all, and never over a file that exists (FileExistsError)."""
    staged = f".podwatch-{secrets.token_hex(8)}"
    write_at(directory, staged, data, mode)
    try:
        rename_at(directory, staged, directory, name)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged, dir_fd=directory)
        raise
    sync_descriptor(directory)
