"""Read a configuration file that only root or the caller can have written. The daemon and every command use this.

The check follows links and tests the file itself: a regular file of root or the caller that no other user can write, or
any regular file on a read-only mount (a Kubernetes ConfigMap, whose file is a link into a directory that is replaced as
a whole). Parent directories and links are not checked: another user who owns the directory in which you type a command
can choose *which* file of root's or yours is found there, but not its content. On a FUSE mount the server reports the
owner, so the server itself must belong to root or the caller.
"""

import os
import stat
from pathlib import Path

from podwatch.domain.errors import ConfigurationError

MAX_BYTES = 1 << 20


def read_trusted(path: Path, what: str = "the configuration") -> str:
    """The file's text. ``what``: its name in messages. ConfigurationError if it cannot be read or is not trusted."""
    raw = read_trusted_bytes(path, what)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigurationError(
            f"{what} is not valid UTF-8", where=f"{path}:{line}", fix="save it as UTF-8"
        ) from error


def read_trusted_bytes(path: Path, what: str = "the configuration") -> bytes:
    """The file's bytes. Raises like ``read_trusted``. Does not block on a FIFO."""
    try:
        # O_PATH first: opening a device, or a file with another user's lease, can already have side effects.
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            _check(path, place, what)
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


def _check(path: Path, place: int, what: str) -> None:
    status = os.fstat(place)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{what} is not a regular file", where=str(path))
    server = _fuse_user(place, status)
    if server not in (0, os.geteuid()):
        raise ConfigurationError(
            f"{what} is on a FUSE mount of uid {server}, who could make podwatch run any command",
            where=str(path),
            fix="copy it to your own directory",
        )
    if os.fstatvfs(place).f_flag & os.ST_RDONLY:
        return
    file = os.path.realpath(path) if path.is_symlink() else path
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigurationError(
            f"{what} belongs to uid {status.st_uid}, who could make podwatch run any command",
            where=str(path),
            fix=f"chown {os.geteuid()} {file}",
        )
    if status.st_mode & 0o022:
        raise ConfigurationError(
            f"{what} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})",
            where=str(path),
            fix=f"chmod go-w {file}",
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
