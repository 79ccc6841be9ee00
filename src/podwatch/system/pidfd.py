"""Reads a process's exit status from the kernel, which otherwise only its parent gets."""

import fcntl
import os
import struct

_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO: _IOWR(0xFF, 11, struct pidfd_info), of which the first version has 64 bytes."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT, Linux 6.15: the exit status, once the parent has reaped the process."""
_SIZE, _CODE_AT = 64, 60


def exit_of(fd: int) -> tuple[int | None, int | None] | None:
    """(exit code, signal) of this pidfd's process, one of them None; None until its parent has reaped it, and always on
    a kernel before 6.15. Never blocks, never raises."""
    answer = bytearray(_SIZE)
    struct.pack_into("<Q", answer, 0, _EXIT)
    try:
        fcntl.ioctl(fd, _GET_INFO, answer)
    except OSError:
        return None
    if not struct.unpack_from("<Q", answer)[0] & _EXIT:
        return None
    status = struct.unpack_from("<i", answer, _CODE_AT)[0]
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None
