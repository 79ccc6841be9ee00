"""A /dev with files named as NVIDIA's devices, seen in the mount namespace of one test only. Needs root."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

_REAL = ("null", "zero", "full", "random", "urandom", "tty", "pts", "shm")
_LINKS = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


@contextlib.contextmanager
def own_dev(directory: Path, names: tuple[str, ...]) -> Iterator[None]:
    """Mount ``directory``, which is made, at /dev, with empty files of these names in it."""
    directory.mkdir()
    for name in _REAL:
        (directory / name).mkdir() if Path("/dev", name).is_dir() else (directory / name).touch()
        subprocess.run(["mount", "--rbind", f"/dev/{name}", str(directory / name)], check=True)
    for name, target in _LINKS.items():
        (directory / name).symlink_to(target)
    for name in names:
        (directory / name).touch()
    subprocess.run(["mount", "--rbind", str(directory), "/dev"], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--recursive", "--lazy", "/dev"], check=True)
        for name in _REAL:  # or whoever removes the directory removes what is in /dev/shm
            subprocess.run(["umount", "--recursive", "--lazy", str(directory / name)], check=True)
