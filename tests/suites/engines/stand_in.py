"""A program called podwatch that ends as it is told to, and notes its starts and signals: for what a loop or an engine
does with exit codes. ``codes`` has one word for each start: a code, KILL, or ``wait`` (until a signal, then 86 1 s
later).
"""

import sys
import time
from pathlib import Path

PROGRAM = f"""#!{sys.executable} -S
import os, signal, sys, time
from pathlib import Path
here, told = Path({{here!r}}), []
def left(number, frame):
    told.append(number)
    with (here / "signals").open("a") as out:
        out.write(signal.Signals(number).name + "\\n")
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, left)
with (here / "starts").open("a") as out:
    out.write(" ".join(sys.argv[1:]) + "\\n")
code = (here / "codes").read_text().split()[len((here / "starts").read_text().splitlines()) - 1]
if code == "KILL":
    os.kill(os.getpid(), signal.SIGKILL)
if code == "wait":
    while not told:
        time.sleep(0.02)
    time.sleep(1)  # its goodbye
    code = "86"
os._exit(int(code))  # as podwatch's init: sys.exit takes the handlers away first, and a signal replaces the code
"""


class StandIn:
    """``bin`` is for PATH."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.bin = directory, directory / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "podwatch"
        program.write_text(PROGRAM.format(here=str(directory)))
        program.chmod(0o755)

    def ends_with(self, codes: str) -> None:
        """The codes of the next starts; what was noted before is forgotten."""
        for name in ("starts", "signals"):
            (self.directory / name).unlink(missing_ok=True)
        (self.directory / "codes").write_text(codes)

    @property
    def starts(self) -> list[str]:
        """The arguments of each start."""
        return self._lines("starts")

    @property
    def signals(self) -> list[str]:
        return self._lines("signals")

    def wait_started(self, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not self.starts:
            assert time.monotonic() < end, "podwatch was not started"
            time.sleep(0.02)

    def _lines(self, name: str) -> list[str]:
        try:
            return (self.directory / name).read_text().splitlines()
        except OSError:
            return []
