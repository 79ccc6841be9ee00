"""Real terminals for tests: a program on a pseudo-terminal of its own, typed at and read from."""

import os
import pty
import select
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from podwatch.system import procfs


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

    def answers(self) -> bool:
        """Whether the shell in it still takes commands. The sum is written out: the terminal echoes what is typed."""
        self.type("echo here-$((40 + 2))-here")
        self.expect("here-42-here")
        return True


@contextmanager
def terminal(argv: Sequence[str], cwd: str = "/") -> Iterator[Terminal]:
    """Everything in its session is killed at the end."""
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), {**os.environ, "PS1": "$ ", "TERM": "dumb", "ENV": "", "HISTFILE": "/dev/null"})
    try:
        yield Terminal(pid, master)
    finally:
        for member in procfs.all_pids():
            status = procfs.read_stat(member)
            if status is not None and status.session == pid:
                os.kill(member, signal.SIGKILL)
        os.close(master)
        os.waitpid(pid, 0)
