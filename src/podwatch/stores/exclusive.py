"""Creates a name in a directory for the first of several writers."""

import os
from pathlib import Path


def name_if_free(source: Path, directory: int, name: str, data: bytes) -> bool:
    """Give the file ``source``, which holds ``data``, this name in ``directory`` (a descriptor), unless it is taken.

    By a link, so that it is whole at once; where a file system has none (SMB, exFAT), created exclusively and filled
    then, with the same times. Raises OSError.
    """
    try:
        os.link(source, name, dst_dir_fd=directory)
    except FileExistsError:
        return False
    except OSError:
        try:
            made = os.open(
                name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=directory
            )
        except FileExistsError:
            return False
        with os.fdopen(made, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(made)
            times = source.lstat()
            os.utime(made, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.fsync(directory)
    return True
