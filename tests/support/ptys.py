"""Real terminals for tests: a program on a pseudo-terminal of its own, typed at and read from."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tests.support import processes


class Screen:
    """What a window of this size shows after a program has written to it: wrapping, scrolling, and the few control
    sequences that podwatch uses. Anything else fails."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._lines, self._row, self._column = [""] * rows, 0, 0

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines]

    def write(self, text: str) -> None:
        for piece in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", text):
            self._take(piece)

    def _take(self, piece: str) -> None:
        if piece == "\x1b[H":
            self._row = self._column = 0
        elif piece == "\x1b[K":
            self._lines[self._row] = self._lines[self._row][: self._column]
        elif piece == "\x1b[J":
            self._lines[self._row] = self._lines[self._row][: self._column]
            self._lines[self._row + 1 :] = [""] * (self.rows - self._row - 1)
        elif piece == "\r":
            self._column = 0
        elif piece == "\n":
            self._down()
        elif len(piece) == 1:
            if self._column == self.columns:
                self._column = 0
                self._down()
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + piece + line[self._column + 1 :]
            self._column += 1
        else:
            assert piece.endswith("m"), piece

    def _down(self) -> None:
        if self._row == self.rows - 1:
            self._lines = [*self._lines[1:], ""]
        else:
            self._row += 1


class Terminal:
    """``pid`` leads a session on a new terminal. Reading is bounded, and waits for what is expected."""

    def __init__(self, pid: int, master: int) -> None:
        self.pid, self._master, self._read = pid, master, ""

    def type(self, line: str) -> None:
        os.write(self._master, f"{line}\n".encode())

    def expect(self, text: str, seconds: float = 60.0) -> None:
        """Wait until it was printed; what was printed up to there is done with."""
        deadline = time.monotonic() + seconds
        while text not in self._read:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not printed: {self._read[-2000:]!r}"
            if select.select([self._master], [], [], left)[0]:
                self._read += os.read(self._master, 65_536).decode(errors="replace")
        self._read = self._read.partition(text)[2]

    def read(self, until: str, seconds: float = 60.0) -> str:
        """What is printed from here on up to and with this text."""
        before = self._read
        self._read = ""
        deadline = time.monotonic() + seconds
        while until not in before:
            left = deadline - time.monotonic()
            assert left > 0, f"{until!r} was not printed: {before[-2000:]!r}"
            if select.select([self._master], [], [], left)[0]:
                before += os.read(self._master, 65_536).decode(errors="replace")
        found, mark, self._read = before.partition(until)
        return found + mark

    def resize(self, columns: int, rows: int) -> None:
        """As a person who changes the window's size."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def answers(self) -> bool:
        """Whether the shell in it still takes commands. The sum is written out: the terminal echoes what is typed."""
        self.type("echo here-$((40 + 2))-here")
        self.expect("here-42-here")
        return True


@contextmanager
def terminal(
    argv: Sequence[str],
    cwd: str = "/",
    *,
    size: tuple[int, int] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Iterator[Terminal]:
    """Everything in its session is killed at the end. ``size``: columns and rows."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        if size is not None:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        os.execvpe(argv[0], list(argv), {**environ, "PS1": "$ ", "TERM": "dumb", "ENV": "", "HISTFILE": "/dev/null"})
    try:
        yield Terminal(pid, master)
    finally:
        for member in processes.all_pids():
            status = processes.read_stat(member)
            if status is not None and status.session == pid:
                os.kill(member, signal.SIGKILL)
        os.close(master)
        os.waitpid(pid, 0)
