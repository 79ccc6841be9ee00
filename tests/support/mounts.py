"""Small file systems of a test's own."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_mount(mount: Path, size: int, options: str = "") -> Iterator[bool]:
    """A tmpfs of ``size`` bytes at ``mount``; False where it may not be mounted."""
    mount.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}{options}", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)
