"""The daemon, started in the background from a directory in which every import by name is another user's code."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.asking import kill_engine
from tests.support.daemon import DaemonProcess
from tests.support.poison import INSTALLED, STANDARD, Poison
from tests.support.rig import Rig, alive

pytestmark = pytest.mark.slow

SCRIPT = Path(sys.prefix, "bin", "podwatch")


@pytest.fixture
def hook() -> Iterator[tuple[str, list[bytes]]]:
    """A server that takes notices, and what it got."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", got
    server.shutdown()
    server.server_close()


def cwd_of(pid: int) -> str:
    return str(Path(f"/proc/{pid}/cwd").readlink())


def endpoint(daemon: DaemonProcess) -> int:
    """The daemon's pid; 0 while there is none."""
    try:
        pid = int(json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())["pid"])
    except (OSError, StopIteration, ValueError):
        return 0
    return pid if alive(pid) else 0


def test_a_night_in_a_poisoned_directory(rig: Rig, elsewhere: Path, hook: tuple[str, list[bytes]]) -> None:
    """Detached, with every path relative: it starts training, saves, uploads, sends notices, restarts training, is
    killed and started again by its init, reloads, and a save is restored, all with nothing imported from there."""
    url, notices = hook
    poison = Poison(rig.root, [*STANDARD, *INSTALLED]).with_podwatch()
    (rig.root / "secrets.env").write_text("FROM_THE_FILE=yes\n")
    (rig.root / "secrets.env").chmod(0o600)
    daemon = rig.daemon(
        {"PYTHONPATH": "/nonexistent/of-the-operator", "PODWATCH_CONFIG": "podwatch.toml"},
        trainer__output_dir="work/outputs", trainer__cwd="work", trainer__env_file="secrets.env", state_dir="state",
        sync__store=f"file://{elsewhere}", notify__urls=[url], recovery__preempt_grace="5s",
    )  # fmt: skip

    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SCRIPT), *arguments], cwd=rig.root, env=daemon.environ, capture_output=True, text=True, timeout=180
        )

    started = typed("run", "--detach")
    assert started.returncode == 0, started.stderr
    daemon.log = rig.root / "state" / rig.run_id / "podwatch.log"
    pid = daemon.wait_for(lambda: endpoint(daemon), 30, "a daemon")
    init = processes.read_stat(pid).parent_pid  # type: ignore[union-attr]
    try:
        daemon.wait_for(lambda: rig.trainer_pid, 30, "training")
        assert (cwd_of(pid), cwd_of(init)) == ("/", "/")
        assert "-P" in processes.command(pid)
        trainer = rig.trainer_pid
        assert cwd_of(trainer) == str(rig.root / "work")
        assert processes.environment_value(trainer, "PYTHONPATH") == "/nonexistent/of-the-operator"
        assert processes.environment_value(trainer, "FROM_THE_FILE") == "yes"
        assert processes.environment_value(trainer, "PODWATCH_DIRECTORY") is None
        daemon.wait_event("published", 40)
        kill_engine(rig)
        daemon.wait_event("incident-closed", 40)
        daemon.wait_for(lambda: notices, 30, "a notice")

        seen = len(daemon.events())
        os.kill(pid, signal.SIGKILL)
        daemon.wait_event("trainer-adopted", 40, after=seen)
        daemon.wait_for(lambda: endpoint(daemon) not in (0, pid), 20, "another daemon")
        os.kill(endpoint(daemon), signal.SIGHUP)
        daemon.wait_event("config-reloaded", 20, after=seen)
        restored = typed("restore", "--to", "there")
        assert restored.returncode == 0, restored.stderr
        assert list((rig.root / "there").rglob(".metadata"))
    finally:
        os.kill(init, signal.SIGTERM)
        daemon.wait_for(lambda: not alive(init), 60, "the init has ended")
    assert poison.imported == []
