"""Works on files with the rights of the user whose directories they are in: the kernel then refuses what that user
cannot do, and what is made belongs to that user.

``setfsuid`` and ``setfsgid`` change one thread only. So do the groups by the raw system call; the C library's function
changes them in every thread. A thread that is started meanwhile has the same rights. A program that is started has
podwatch's user again, and sets its rights itself: the user may be unable to read the interpreter.

The kernel takes root's power over files away with the change, and gives it back with the next one.
"""

import contextlib
import ctypes
import errno
import os
import platform
import pwd
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_libc = ctypes.CDLL(None, use_errno=True)
_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159, "riscv64": 159}.get(platform.machine(), 116)
_GET_DEATH_SIGNAL, _SET_DEATH_SIGNAL, _GET_DUMPABLE, _SET_DUMPABLE = 2, 1, 3, 4
_NOBODY = 65_534
_ASK = ctypes.c_uint32(-1)


@dataclass(frozen=True, slots=True)
class Rights:
    """Those of one user."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> "Rights | None":
        """As ``dataclasses.asdict`` has it, after JSON."""
        return None if data is None else cls(int(data["uid"]), int(data["gid"]), tuple(data["groups"]))

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """This thread works on files with these rights. Nested uses cost nothing. Raises PermissionError where podwatch
        lacks CAP_SETUID or CAP_SETGID. Never across an ``await``."""
        before = _libc.setfsuid(_ASK)
        if before == self.uid:
            yield
            return
        earlier = _OWN if before == _OWN.uid else Rights(before, _libc.setfsgid(_ASK), tuple(os.getgroups()))
        try:
            _set(self)
            yield
        finally:
            _set(earlier)


_OWN: Final = Rights(os.geteuid(), os.getegid(), tuple(os.getgroups()))


def own_rights() -> Rights:
    """Those that podwatch was started with: to leave a user's rights for a moment."""
    return _OWN


def rights_of(uid: int, gid: int | None = None) -> Rights:
    """Those of a user. One without an account has the group of its directory, ``gid``, unless that is root's."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return Rights(uid, gid or _NOBODY)
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    return Rights(uid, account.pw_gid, tuple(sorted({*groups} - {account.pw_gid})))


def applied(rights: Rights | None) -> contextlib.AbstractContextManager[None]:
    """``rights.applied()``; with None the rights stay as they are."""
    return contextlib.nullcontext() if rights is None else rights.applied()


def _set(rights: Rights) -> None:
    """A change of rights makes the kernel forget that the process dies with its parent, and closes its entries below
    /proc to other processes of its user; both are set again."""
    signal = ctypes.c_int()
    _libc.prctl(_GET_DEATH_SIGNAL, ctypes.byref(signal))
    dumpable = _libc.prctl(_GET_DUMPABLE)
    _set_groups(rights.groups)
    _libc.setfsgid(ctypes.c_uint32(rights.gid))
    _libc.setfsuid(ctypes.c_uint32(rights.uid))
    now = (_libc.setfsuid(_ASK), _libc.setfsgid(_ASK))
    _libc.prctl(_SET_DEATH_SIGNAL, signal)
    _libc.prctl(_SET_DUMPABLE, dumpable)
    if now != (rights.uid, rights.gid):
        raise PermissionError(errno.EPERM, f"podwatch cannot work as user {rights.uid} (it lacks CAP_SETUID)")


def _set_groups(groups: tuple[int, ...]) -> None:
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(_SETGROUPS), ctypes.c_size_t(len(groups)), array) != 0:
        raise PermissionError(ctypes.get_errno(), "podwatch cannot set its groups (it lacks CAP_SETGID)")
