"""One container: its own process, mount and host-name namespaces in a root directory, and nothing else of Docker."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podwatch.system import procfs
from tests.suites.container.images import REPO, Rootfs
from tests.support import own_times
from tests.support.daemon import PATIENCE

RUN = "pod-1"
OUTPUT = "/srv/work/outputs"
SUPERVISOR = f"/var/lib/podwatch/{RUN}/supervisor"
TIMES = "/srv/test-times.toml"
LOG = f"/var/lib/podwatch/{RUN}/podwatch.log"
# A volume of its own for the store: podwatch refuses one on the checkpoints' filesystem.
MOUNTS = """
set -e
cd "$1"; shift
mount -t proc proc proc
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs srv/store
hostname pod-under-test
exec chroot . "$@"
"""


def configuration(rootfs: Rootfs) -> str:
    command = [rootfs.python, "-S", "/srv/tests/support/fake_trainer.py", "--output-dir", OUTPUT,
               "--control", "/srv/control", "--ckpt.interval", "10"]  # fmt: skip
    return f"""\
run_id = "{RUN}"
[trainer]
layout = "prime-rl"
output_dir = "{OUTPUT}"
command = {json.dumps(command)}
[gpu]
poll = "0.2s"
[checkpoints]
rescan = "0.3s"
settle = "0.2s"
[sync]
store = "file:///srv/store"
claim_wait = "1s"
"""


class Container:
    """``start`` makes ``argv`` its PID 1; ``close`` ends everything in it."""

    def __init__(self, rootfs: Rootfs, log: Path) -> None:
        self.rootfs, self.log = rootfs, log
        self._outer: subprocess.Popen[bytes] | None = None
        for name in ("srv", "var/lib/podwatch", "run/podwatch"):
            shutil.rmtree(rootfs.path / name, ignore_errors=True)
        for name in ("srv/work", "srv/store", "srv/control", "etc/podwatch", "proc", "dev", "run", "var/lib/podwatch"):
            (rootfs.path / name).mkdir(parents=True, exist_ok=True)
        support = rootfs.path / "srv/tests/support"
        support.mkdir(parents=True)
        for name in ("__init__.py", "checkpoints.py", "creations.py", "fake_trainer.py"):
            shutil.copy(REPO / "tests/support" / name, support / name)
        self.configure(configuration(rootfs))

    # -- life

    def start(self, *argv: str) -> "Container":
        kept = {name: os.environ[name] for name in ("LANG", "TZ") if name in os.environ}
        kept[own_times.VARIABLE] = TIMES
        environment = {**kept, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        outside = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "sh", "-c", MOUNTS, "sh"]
        with self.log.open("ab") as log:
            self._outer = subprocess.Popen(
                [*outside, str(self.rootfs.path), *(argv or self.rootfs.argv)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        end = time.monotonic() + 60
        while self.outer.poll() is None and time.monotonic() < end and not self._inside():
            time.sleep(0.02)
        return self

    def _inside(self) -> bool:
        """Whether PID 1 has its root and runs what it was told to."""
        children = procfs.children(self.outer.pid)
        try:
            return bool(children) and Path(f"/proc/{children[0]}/root").readlink() == self.rootfs.path
        except OSError:
            return False

    @property
    def outer(self) -> "subprocess.Popen[bytes]":
        assert self._outer is not None
        return self._outer

    @property
    def first(self) -> int:
        """PID 1, as the host numbers it."""
        (pid,) = procfs.children(self.outer.pid)
        return pid

    def stop(self, seconds: float = 30.0) -> int:
        """What ``docker stop`` does first; the exit code of PID 1."""
        os.kill(self.first, signal.SIGTERM)
        return self.outer.wait(seconds)

    def close(self) -> None:
        if self._outer is not None and self._outer.poll() is None:
            self._outer.kill()
            self._outer.wait()

    # -- inside

    def run(self, *command: str, check: bool = True, seconds: float = 60.0) -> str:
        done = subprocess.run(
            ["nsenter", "-t", str(self.first), "--mount", "--pid", "--uts", "--root", "--wd=/", *command],
            capture_output=True, text=True, timeout=seconds,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        )  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def signal(self, name: str, pid: int) -> None:
        """By the shell: a small image has no kill of its own."""
        self.run("sh", "-c", f"kill -{name} {pid}")

    def podwatch(self, *arguments: str, check: bool = False) -> str:
        return self.run(self.rootfs.podwatch, *arguments, check=check)

    def status(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self.podwatch("status", "--json"))
        except ValueError:
            return {}
        return document

    def configure(self, text: str) -> None:
        """Write podwatch.toml, and what of it are podwatch's own times."""
        config, times = own_times.split(text)
        self.write("/etc/podwatch/podwatch.toml", config)
        self.write(TIMES, times)

    def write(self, path: str, text: str) -> None:
        target = self.rootfs.path / path.lstrip("/")
        target.write_text(text)
        target.chmod(0o600)

    def read(self, path: str) -> str:
        try:
            return (self.rootfs.path / path.lstrip("/")).read_text(errors="replace")
        except OSError:
            return ""

    def processes(self) -> dict[int, tuple[str, str, int]]:
        """pid -> (state, command line or name, parent), all as seen inside."""
        script = 'cd /proc; for p in [0-9]*; do echo "$(cat $p/stat)|$(tr "\\0\\n" "  " < $p/cmdline)"; done'
        found = {}
        for line in self.run("sh", "-c", f"({script}) 2>/dev/null; true").splitlines():
            stat, _, command = line.partition("|")
            if not stat[:1].isdigit():
                continue  # it ended while being looked at
            pid, rest = int(stat.split()[0]), stat.rpartition(")")[2].split()
            name = stat.partition("(")[2].rpartition(")")[0]
            found[pid] = (rest[0], command.strip() or name, int(rest[1]))
        return found

    def find(self, what: str) -> int:
        """The pid (inside) of the one living process whose command line contains ``what``; 0 if there is none."""
        pids = [pid for pid, (state, command, _) in self.processes().items() if what in command and state not in "ZX"]
        return min(pids, default=0)

    @property
    def trainer(self) -> int:
        return self.find("fake_trainer.py --output-dir")

    @property
    def daemon(self) -> int:
        for pid, (state, command, _) in self.processes().items():
            if "podwatch run" in command.replace("podwatch --config", "podwatch") and "supervise.py" not in command:
                return pid if state not in "ZX" else 0
        return 0

    @property
    def init(self) -> int:
        return self.find("supervise.py init")

    def said(self) -> str:
        return self.log.read_text(errors="replace") + self.read(LOG)

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        end = time.monotonic() + PATIENCE * seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            assert self.outer.poll() is None, f"PID 1 ended with {self.outer.returncode} before {what}\n{self.said()}"
            time.sleep(0.1)
        raise AssertionError(f"not within {PATIENCE * seconds:g} s: {what}\n{self.said()[-4000:]}\n{self.processes()}")

    def wait_running(self) -> int:
        """Until podwatch knows that training runs; the trainer's pid inside."""
        self.wait(lambda: self.status().get("training", {}).get("state") == "running", 60, "training runs")
        return self.trainer
