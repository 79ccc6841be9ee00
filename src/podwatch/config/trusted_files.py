"""Read a file that only root or the caller can have written or put where it is: the configuration, and the files of
keys and passwords that it names. The daemon and every command use this.

Whoever can write such a file, or put another in its place, decides what podwatch runs. So the way to it is walked name
by name, through every link: each directory in which a name is looked up must belong to root or the caller and be closed
to other writers, and the file must be a regular one of root's or the caller's that no other user can write. In a
directory of root's with the sticky bit, such as /tmp, others can add names, also by moving there what is root's: only a
directory of root's or the caller's is accepted there, which nobody else can move. On a read-only mount (a Kubernetes
ConfigMap or Secret) owners and modes do not matter. On a FUSE mount the server reports the owners, so the server itself
must belong to root or the caller.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from podwatch.domain.errors import ConfigurationError
from podwatch.system.follow import follow

MAX_BYTES: Final = 1 << 20
_ELSEWHERE: Final = "move it to a directory that only root or you can write"


def read_trusted(path: Path, what: str = "the configuration", *, secret: bool = False) -> str:
    """The file's text. ``what``: its name in messages. ``secret``: other users must not be able to read it either.
    ConfigurationError if it cannot be read or is not trusted; its text never has any of the content."""
    raw = read_trusted_bytes(path, what, secret=secret)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigurationError(
            f"{what} is not valid UTF-8", where=f"{path}:{line}", fix="save it as UTF-8"
        ) from error


def read_trusted_bytes(path: Path, what: str = "the configuration", *, secret: bool = False) -> bytes:
    """The file's bytes. Raises like ``read_trusted``. Does not block on a FIFO."""
    try:
        # O_PATH first: opening a device, or a file with another user's lease, can already have side effects.
        place = _open_way(path, what)
        try:
            _check_file(path, place, what, secret=secret)
            descriptor = os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        finally:
            os.close(place)
        with os.fdopen(descriptor, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {what}: {error.strerror}", where=str(path), fix="check its path and permissions"
        ) from error
    if len(raw) > MAX_BYTES:
        raise ConfigurationError(f"{what} is larger than 1 MiB", where=str(path), fix="correct the path")
    return raw


def check_trusted(path: Path, what: str, *, shared: bool = False) -> None:
    """Raise ConfigurationError if another user could write or replace the file or directory at ``path``, or, unless
    ``shared``, add names to that directory; OSError if it is not there."""
    place = _open_way(path, what)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            _check_file(path, place, what, secret=False)
        elif _check_directory(path, place, what) and not shared:
            raise ConfigurationError(
                f"other users can add files to {what}", where=str(path), fix="use a directory that only root can write"
            )
    finally:
        os.close(place)


def check_command(argv: Sequence[str], directory: Path, path: str | None) -> None:
    """Raise ConfigurationError if another user could decide what this command runs: by its program, found in ``path``,
    by a file among its arguments, or by its working directory. Says nothing of what is not there."""
    what = "runs with podwatch's rights"
    with contextlib.suppress(OSError):
        check_trusted(directory, f"the working directory of {argv[0]}, which {what}")
    program = str(directory / argv[0]) if "/" in argv[0] else shutil.which(argv[0], path=path)
    for file in (program, *(str(directory / word) for word in argv[1:] if not word.startswith("-"))):
        with contextlib.suppress(OSError, ValueError):
            if file and Path(file).is_file():
                check_trusted(Path(file), f"{file}, which {what}")


# -- the way -----------------------------------------------------------------------------------------------------------


def _open_way(path: Path, what: str) -> int:
    """An O_PATH descriptor of what ``path`` leads to. Raises ConfigurationError for a directory or a link on the way
    that another user controls, OSError."""
    with contextlib.closing(follow(str(path.absolute()))) as steps:
        for step in steps:
            if _check_directory(path, step.directory, what):
                _check_name(path, step.place, what)
            if step.last and not step.is_link:
                return os.dup(step.place)
    return os.open("/", os.O_PATH | os.O_CLOEXEC)


def _check_directory(path: Path, directory: int, what: str) -> bool:
    """Whether others can add names to this directory, but not replace any. ConfigurationError if they can do that."""
    status = os.fstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        return False
    server, read_only = _fuse_user(directory, status), os.fstatvfs(directory).f_flag & os.ST_RDONLY
    of_root = status.st_uid == 0 or _is_outside(status.st_uid)
    others_write = bool(status.st_mode & 0o022) and not read_only
    why, way_out = "", ""
    if server not in (0, os.geteuid()) and not _is_outside(server):
        why = f"is on a FUSE mount of uid {server}"
    elif not (of_root or read_only or status.st_uid == os.geteuid()):
        why = f"belongs to uid {status.st_uid}"
    elif others_write and not (of_root and status.st_mode & stat.S_ISVTX):
        why, way_out = f"can be written by others (mode {stat.S_IMODE(status.st_mode):04o})", "chmod go-w {}, or "
    if why:
        name = Path(f"/proc/self/fd/{directory}").readlink()
        raise ConfigurationError(
            f"another user could replace {what}, and so decide what podwatch runs: {name} {why}",
            where=str(path),
            fix=f"{way_out.format(name)}{_ELSEWHERE}",
        )
    return others_write


def _check_name(path: Path, place: int, what: str) -> None:
    """Of a name in a directory to which others can add names: ConfigurationError for all but a directory, which is
    checked when the way goes on in it. A link can be theirs; a file or link of root's can have been moved there."""
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        name = Path(f"/proc/self/fd/{place}").readlink()
        raise ConfigurationError(
            f"another user can have put {name} there, and so chosen {what}", where=str(path), fix=_ELSEWHERE
        )


# -- the file ----------------------------------------------------------------------------------------------------------


def _check_file(path: Path, place: int, what: str, *, secret: bool) -> None:
    status = os.fstat(place)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{what} is not a regular file", where=str(path))
    mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
    file = os.path.realpath(path) if path.is_symlink() else path
    read_only = bool(os.fstatvfs(place).f_flag & os.ST_RDONLY)
    if secret and status.st_mode & 0o077:
        fix = "mount it with mode 0400 (Kubernetes: defaultMode, and no fsGroup)" if read_only else f"chmod 600 {file}"
        raise ConfigurationError(f"{what} can be read by other users ({mode})", where=str(path), fix=fix)
    server = _fuse_user(place, status)
    if server not in (0, os.geteuid()) and not _is_outside(server):
        raise ConfigurationError(
            f"{what} is on a FUSE mount of uid {server}, who could make podwatch run any command",
            where=str(path),
            fix="copy it to your own directory",
        )
    if read_only:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"{what} belongs to uid {status.st_uid}, who could make podwatch run any command",
            where=str(path),
            fix=f"chown {os.geteuid()} {file}",
        )
    if status.st_mode & 0o022:
        raise ConfigurationError(
            f"{what} can be written by other users ({mode})", where=str(path), fix=f"chmod go-w {file}"
        )


def _fuse_user(place: int, status: os.stat_result) -> int:
    """The uid of the FUSE server of this file; 0 for any other file system."""
    if os.major(status.st_dev) != 0:
        return 0  # a disk
    try:
        info = Path(f"/proc/self/fdinfo/{place}").read_text()
        mount = next(line.split()[1] for line in info.splitlines() if line.startswith("mnt_id:"))
        mounts = Path("/proc/self/mountinfo").read_bytes().decode(errors="replace")
    except (OSError, StopIteration):
        return 0
    return fuse_user(mount, mounts)


def fuse_user(mount: str, mounts: str) -> int:
    """The same for a mount id and the text of /proc/self/mountinfo."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields = after.split()
        if before.split()[0] == mount and len(fields) > 2 and fields[0].startswith("fuse"):
            options = dict(option.partition("=")[::2] for option in fields[2].split(","))
            return int(options.get("user_id", "0"))
    return 0


def _is_outside(uid: int) -> bool:
    """Whether this is what the kernel shows, in a user namespace, for an owner outside of it: so ``/`` and ``/tmp``
    look there."""
    try:
        shown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        spans = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return uid == shown and not any(int(first) <= uid < int(first) + int(count) for first, _, count in spans)
