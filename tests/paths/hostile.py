"""A pod whose training user T attacks: what T can do to the paths, and what must have stayed as it was.

T and E are uids without an account. T owns output_dir and the directory it is in, which is the normal case. Every flip
is made with T's own rights, so that no test shows more than T can do.
"""

import ctypes
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.drivers.paths import (
    HIDDEN,
    Guard,
    Operation,
    PodwatchError,
    as_user,
    renames_by_descriptor,
    without_waiting,
)

T, E = 61_017, 61_018
"""The trainer's user, and a stranger."""
SECRET = b"only root may read this"
as_root = pytest.mark.root
_libc = ctypes.CDLL(None, use_errno=True)
_EXCHANGE = 2
_HERE = -100


def own(path: Path, uid: int) -> Path:
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def made(path: Path, uid: int = T) -> Path:
    """A directory of ``uid``'s, with what is missing above it."""
    for above in (*reversed(path.parents), path):
        if not above.exists():
            above.mkdir()
            own(above, uid)
    return path


def saved(path: Path, uid: int = T) -> Path:
    made(path, uid)
    for name in ("model.bin", "DONE"):
        (path / name).write_bytes(b"weights of " + path.name.encode())
        own(path / name, uid)
    return path


def victim(path: Path) -> Path:
    """A directory that only root may enter, with everything that a path of the trainer's could lead to."""
    for inside in ("", "step_9", "checkpoints/step_9", "rollouts/step_9"):
        (path / inside).mkdir(parents=True, exist_ok=True)
        (path / inside / "secret").write_bytes(SECRET)
        (path / inside / "secret").chmod(0o600)
    (path / "latest").write_bytes(SECRET)
    for directory, _, _ in os.walk(path):
        Path(directory).chmod(0o755)
    path.chmod(0o700)
    return path


Picture = dict[str, tuple[object, ...]]


def picture(path: Path) -> Picture:
    found: Picture = {}
    for one in (path, *sorted(path.rglob("*"))):
        status = one.lstat()
        content = one.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        found[str(one.relative_to(path))] = (status.st_ino, status.st_uid, status.st_gid, status.st_mode, content)
    return found


@dataclass
class Site:
    """``base`` is root's, ``home`` and ``out`` are T's."""

    base: Path
    guard: Guard = field(init=False)
    """podwatch, on ``out``."""

    def __post_init__(self) -> None:
        self.base.mkdir()
        self.base.chmod(0o755)
        self.home = made(self.base / "home")
        self.out = made(self.home / "out")
        saved(self.out / "checkpoints" / "step_5")
        saved(self.out / "checkpoints" / "step_9")
        saved(self.out / "rollouts" / "step_9")
        self.beside, self.above = victim(self.home / "victim"), victim(self.base / "victim")
        self.before = {path: (path.lstat().st_ino, picture(path)) for path in (self.beside, self.above)}
        self.guard = Guard(self.base, self.home, self.out, T)

    def close(self) -> None:
        self.guard.close()

    def unharmed(self) -> None:
        """Both victims, wherever T's own exchanges left them, are what they were, and no other user read them."""
        inodes = dict(self.before.values())
        seen = set()
        for directory, names, _ in os.walk(self.base):
            for name in names:
                path = Path(directory) / name
                inode = path.lstat().st_ino
                if inode in inodes and not path.is_symlink():
                    seen.add(inode)
                    assert picture(path) == inodes[inode], f"{path} is not what it was"
        assert seen == set(inodes), "a directory of root's is gone"
        assert not readable(self.base, T, E), "a user can read what only root may"


def readable(base: Path, *uids: int) -> list[tuple[int, Path]]:
    """Files with root's secret that one of these users can open."""
    secret = [
        path
        for directory, _, names in os.walk(base)
        for path in (f"{directory}/{name}" for name in names)
        if stat.S_ISREG((about := os.lstat(path)).st_mode) and about.st_size == len(SECRET)
        if Path(path).read_bytes() == SECRET
    ]
    found = []
    for uid in uids:
        with as_user(uid):
            for path in secret:
                with suppress(PermissionError):
                    os.close(os.open(path, os.O_RDONLY))
                    found.append((uid, Path(path)))
    return found


def exchange(one: Path, other: Path) -> bool:
    """With T's rights, in one step; a plain rename where one of them is not there. False where T may not."""
    with as_user(T):
        for flags in (_EXCHANGE, 1):
            if _libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), flags) == 0:
                return True
    return False


@dataclass(frozen=True)
class Flip:
    """T puts something else at ``spot``."""

    name: str
    prepare: Callable[[Site], tuple[Path, Path]]
    """Makes what is put there; returns (it, the spot)."""


def _link(spot: str, target: Callable[[Site], Path]) -> Callable[[Site], tuple[Path, Path]]:
    def prepare(site: Site) -> tuple[Path, Path]:
        evil = site.home / f"evil-{spot.replace('/', '-')}"
        evil.symlink_to(target(site))
        own(evil, T)
        return evil, site.home / spot

    return prepare


def _forged(spot: str) -> Callable[[Site], tuple[Path, Path]]:
    """A directory of T's own, with the names of ours in it, each a link to the victim."""

    def prepare(site: Site) -> tuple[Path, Path]:
        evil = made(site.home / f"forged-{spot.replace('/', '-')}")
        for name in ("quarantine", "trash", "staging", "uploading", "out", "step_9", "step_5", "checkpoints"):
            own(_linked(evil / name, site.above), T)
        return evil, site.home / spot

    return prepare


def _linked(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


SPOTS = (
    "out",
    "out/checkpoints",
    "out/checkpoints/step_9",
    "out/rollouts",
    "out/rollouts/step_9",
    "out/run",
    "out/latest",
    f"out/{HIDDEN}",
    f"out/rollouts/{HIDDEN}",
    HIDDEN,
    "to",
    "to/.podwatch-staging",
)
FLIPS = (
    *(Flip(f"{s} -> above", _link(s, lambda site: site.above)) for s in SPOTS),
    *(Flip(f"{s} -> beside", _link(s, lambda site: site.beside)) for s in ("out", "out/rollouts", HIDDEN)),
    *(Flip(f"{s} forged", _forged(s)) for s in ("out", "out/rollouts", HIDDEN, f"out/{HIDDEN}", "to")),
    *(Flip(f"{s} = beside", lambda site, s=s: (site.beside, site.home / s)) for s in ("out", HIDDEN, "to")),  # type: ignore[misc]
)


@contextmanager
def at_call(number: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """``act`` happens just before the ``number``-th system call on a path that podwatch makes: a seam between judging
    and acting, whatever the code in between. Yields [calls seen]."""
    seen = [0]
    busy = False

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal busy
            if not busy:
                seen[0] += 1
                if seen[0] == number:
                    busy = True
                    try:
                        act()
                    finally:
                        busy = False
            return call(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "mkdir", "rename", "rmdir", "unlink", "stat", "listdir", "link", "symlink", "chown"):
            patch.setattr(os, name, before(getattr(os, name)))
        for module, name in renames_by_descriptor():
            patch.setattr(module, name, before(getattr(module, name)))
        yield seen


def play(memory: Path, operation: Operation, flip: Flip, moments: Iterable[int]) -> int:
    """The flip at each of these moments of the operation, each on a fresh site; how often it came to it."""
    done = 0
    for moment in moments:
        with fresh(memory) as one:
            operation.before(one.guard)
            paths, flipped = flip.prepare(one), list[bool]()
            with at_call(moment, lambda paths=paths, flipped=flipped: flipped.append(exchange(*paths))):  # type: ignore[misc]
                run(operation, one)
            if flip.name.endswith("= beside"):  # back and forth: what was opened in between is still held
                exchange(*paths)
                run(operation, one)
            one.unharmed()
            done += any(flipped)
    return done


@contextmanager
def fresh(memory: Path) -> Iterator[Site]:
    made = Site(memory / "site")
    try:
        with without_waiting():
            yield made
    finally:
        made.close()
        shutil.rmtree(made.base)


@contextmanager
def in_memory() -> Iterator[Path]:
    """Thousands of small directories, and no disk is what is tested."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def run(operation: Operation, on: Site) -> str:
    """It may be refused in so many words; anything else is a mistake."""
    try:
        operation.act(on.guard)
    except (PodwatchError, OSError) as error:
        return str(error)
    return ""


def calls(operation: Operation, memory: Path) -> int:
    """How many there are without an attack."""
    with fresh(memory) as one:
        operation.before(one.guard)
        with at_call(0, lambda: None) as seen:
            assert run(operation, one) == "", "without an attack it succeeds"
        one.unharmed()
    return seen[0]
