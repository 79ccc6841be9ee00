"""Two users without accounts, for tests of what they can do to podwatch as root; and a loop in C that exchanges names.

Without root such a test is skipped, with one line that says so.
"""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

T, E = 54_321, 54_322
"""The trainer's user, and a stranger."""
as_root = pytest.mark.root

_EXCHANGE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <signal.h>
#include <unistd.h>
#ifndef RENAME_EXCHANGE
#define RENAME_EXCHANGE 2
#endif
/* exchange UID A B: exchange two names for as long as the parent lives. */
int main(int count, char **words) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (count != 4 || setgid(atoi(words[1])) || setuid(atoi(words[1]))) return 2;
    puts("ready"); fflush(stdout);
    for (;;) renameat2(AT_FDCWD, words[2], AT_FDCWD, words[3], RENAME_EXCHANGE);
}
"""


def own(path: Path, uid: int) -> Path:
    """The whole tree, links themselves."""
    for directory, folders, names in os.walk(path):
        for name in (*folders, *names):
            os.chown(os.path.join(directory, name), uid, uid, follow_symlinks=False)  # noqa: PTH118
    os.chown(path, uid, uid, follow_symlinks=False)
    return path


def enterable(path: Path) -> Path:
    """pytest's directories are closed to other users."""
    for above in (path, *path.parents):
        with contextlib.suppress(OSError):
            above.chmod(above.stat().st_mode | 0o011)
    return path


def owners(path: Path) -> dict[str, int]:
    """Relative name -> uid of everything in a tree, the directory itself included."""
    found = {".": path.lstat().st_uid}
    for entry in path.rglob("*"):
        found[entry.relative_to(path).as_posix()] = entry.lstat().st_uid
    return found


@contextlib.contextmanager
def exchanging(uid: int, first: Path, second: Path) -> Iterator[None]:
    """While this lasts, ``uid`` exchanges the two names as fast as the machine can."""
    with tempfile.TemporaryDirectory() as scratch:
        enterable(Path(scratch))
        program = Path(scratch) / "exchange"
        source = program.with_suffix(".c")
        source.write_text(_EXCHANGE)
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
        program.chmod(0o755)
        process = subprocess.Popen([str(program), str(uid), str(first), str(second)], stdout=subprocess.PIPE)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
