"""A real systemd, booted in a container on an overlay of this machine's own root. Needs root and systemd-nspawn."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.daemon import PATIENCE

REPO = Path(__file__).parents[3]
MISSING = (
    "needs root"
    if os.geteuid() != 0
    else next((f"needs {tool}" for tool in ("systemd-nspawn", "systemctl", "nsenter") if not shutil.which(tool)), "")
)
"""Why this suite cannot run here, in one line; empty if it can."""


class Machine:
    """One booted container. The overlay's upper layer is a tmpfs: nothing it writes reaches the host."""

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, base / "root"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.pid = 0

    def boot(self) -> None:
        self.root.mkdir(parents=True)
        layers = self.base / "layers"
        layers.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=2g", "tmpfs", str(layers))
        for name in ("upper", "work"):
            (layers / name).mkdir()
        options = f"lowerdir=/,upperdir={layers}/upper,workdir={layers}/work"
        _run("mount", "-t", "overlay", "-o", options, "overlay", str(self.root))
        for unit in ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "man-db.timer"):
            with contextlib.suppress(OSError):
                (self.root / "etc/systemd/system" / unit).symlink_to("/dev/null")
        binds = [f"--bind-ro={path}" for path in (REPO, Path(sys.prefix), Path(sys.base_prefix)) if _hidden(path)]
        self._nspawn = subprocess.Popen(
            ["systemd-nspawn", "-D", str(self.root), "--register=no", "--keep-unit", "--machine=podwatch-test",
             *binds, "-b"],
            stdin=subprocess.DEVNULL, stdout=(self.base / "console.log").open("wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.wait(self._find_init, 30, "PID 1 of the container")
        self.wait(lambda: "running" in self.state() or "degraded" in self.state(), 60, "boot")

    def show_boot_id(self) -> None:
        """Take away nspawn's own boot id, so that the machine looks like one: its services and people see the same."""
        self.run("umount", "/proc/sys/kernel/random/boot_id")

    def state(self) -> str:
        return self.run("systemctl", "is-system-running", check=False).strip()

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> str:
        """Run a command inside and return its output."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid), "-a", *command], capture_output=True, text=True, timeout=timeout
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file inside, through the running container's own view of its root."""
        self.run("mkdir", "-p", str(Path(path).parent))
        command = ["nsenter", "-t", str(self.pid), "-a", "tee", path]
        subprocess.run(command, input=text, text=True, stdout=subprocess.DEVNULL, check=True, timeout=30)
        self.run("chmod", f"{mode:o}", path)

    def wait(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        end = time.monotonic() + PATIENCE * seconds
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.2)
        log = (self.base / "console.log").read_text(errors="replace")[-2000:]
        raise AssertionError(f"not within {PATIENCE * seconds:g} s: {what}\n{log}")

    def power_off(self, seconds: float = 60) -> None:
        """As a person or a provider does it; returns when the machine is off. What it wrote is still in ``root``."""
        self.run("systemctl", "poweroff")
        assert self._nspawn is not None
        self._nspawn.wait(seconds)
        self.pid = 0

    def halt(self) -> None:
        if self._nspawn is not None:
            if self.pid:
                subprocess.run(["nsenter", "-t", str(self.pid), "-a", "systemctl", "poweroff", "--force", "--force"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._nspawn.wait(10)
            self._nspawn.kill()
            self._nspawn.wait()
        for path in (self.root, self.base / "layers"):
            subprocess.run(["umount", "-l", str(path)], capture_output=True)

    def _find_init(self) -> bool:
        assert self._nspawn is not None
        if self._nspawn.poll() is not None:
            return False
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        for child in children:
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                self.pid = int(child)
                return True
        return False


@contextlib.contextmanager
def booted() -> Iterator[Machine]:
    base = Path(tempfile.mkdtemp(prefix="podwatch-machine-"))
    machine = Machine(base)
    try:
        machine.boot()
        yield machine
    finally:
        machine.halt()
        shutil.rmtree(base, ignore_errors=True)


def _hidden(path: Path) -> bool:
    """Whether the machine would not see it: /tmp is its own, and the overlay shows only the root filesystem."""
    return path.is_relative_to("/tmp") or path.stat().st_dev != Path("/").stat().st_dev


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
