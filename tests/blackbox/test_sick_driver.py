"""A libnvidia-ml that hangs, aborts or crashes while it is loaded: podwatch stays alive, reports it, and recovers."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import processes
from tests.support.asking import status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

WORDS = {"hang": "hangs while loading", "abort": "(SIGABRT)", "crash": "(SIGSEGV)", "exit": "(exit status 7)"}

DEADLINE = 10
"""Seconds after which a driver that does not answer is called blind (nothing in the configuration changes it)."""


def livez(daemon: DaemonProcess) -> int:
    url = json.loads(next(daemon.runtime.glob("*/endpoint.json")).read_text())["http_url"]
    with urllib.request.urlopen(url + "/livez", timeout=10) as answer:
        code: int = answer.status
        return code


def gpus(daemon: DaemonProcess) -> dict[str, Any]:
    found: dict[str, Any] = next(s for s in status(daemon)["sensors"] if s["name"] == "gpus")
    return found


def readers_of(pid: int) -> list[int]:
    return [
        child for child in processes.descendants(pid)
        if any("sensors/gpu_child" in word for word in processes.command(child))
    ]  # fmt: skip


@pytest.mark.parametrize("how", ["hang", "abort", "crash", "exit"])
def test_a_library_that_cannot_be_loaded_blinds_and_no_more(rig: Rig, how: str) -> None:
    rig.world.loading(how)
    daemon = rig.daemon().start()
    assert daemon.process is not None
    daemon.wait_for(daemon.status, 20, "an answer")
    daemon.wait_for(lambda: gpus(daemon)["state"] == "blind", DEADLINE + 10, "blind")
    detail = gpus(daemon)["detail"]
    assert "libnvidia-ml.so.1" in detail
    assert WORDS[how] in detail
    assert "tries again" in detail
    assert livez(daemon) == 200
    daemon.wait_event("daemon-started", 30)
    for _ in range(20):
        assert len(readers_of(daemon.process.pid)) <= 1
        time.sleep(0.05)
    assert livez(daemon) == 200
    rig.world.loading("")
    daemon.wait_for(lambda: gpus(daemon)["state"] == "ok", 90, "the GPUs are read")
    assert len(readers_of(daemon.process.pid)) == 1
    began = time.monotonic()
    assert daemon.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 30


def test_a_driver_that_hangs_or_kills_its_reader_later_does_not_touch_podwatch(rig: Rig) -> None:
    daemon = rig.daemon().start()
    assert daemon.process is not None
    daemon.wait_for(lambda: gpus(daemon)["state"] == "ok", 40, "the GPUs are read")
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "libnvidia-ml" not in maps, "podwatch itself never loads the driver's library"
    rig.world.hang_all()
    daemon.wait_for(lambda: gpus(daemon)["state"] == "blind", DEADLINE + 10, "blind")
    assert livez(daemon) == 200
    rig.world.hang_all(False)
    daemon.wait_for(lambda: gpus(daemon)["state"] == "ok", 90, "the GPUs are read")
    os.kill(readers_of(daemon.process.pid)[0], signal.SIGKILL)
    daemon.wait_for(lambda: gpus(daemon)["state"] == "blind", DEADLINE, "blind")
    daemon.wait_for(lambda: gpus(daemon)["state"] == "ok", 90, "another process reads them")
    assert daemon.stop(signal.SIGTERM) == 0


def test_a_stop_is_prompt_while_the_library_hangs(rig: Rig) -> None:
    rig.world.loading("hang")
    daemon = rig.daemon().start()
    assert daemon.process is not None
    daemon.wait_event("daemon-started", 40)
    (reader,) = daemon.wait_for(lambda: readers_of(daemon.process.pid), 40, "the GPUs are asked")
    began = time.monotonic()
    assert daemon.stop(signal.SIGTERM, timeout=60) == 0
    assert time.monotonic() - began < 30
    # It ends when its own alarm rings, though nothing is left that would kill it.
    end = time.monotonic() + 3 * (DEADLINE + 10)
    while Path(f"/proc/{reader}").exists():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("how", ["hang", "abort"])
def test_commands_that_look_at_the_gpus_end_and_explain(rig: Rig, how: str, tmp_path: Path) -> None:
    rig.world.loading(how)
    daemon = rig.daemon()
    checked = daemon.command("check")
    assert WORDS[how] in checked.stdout, checked.stdout + checked.stderr
    # Named by its pid: other tests may train on this machine meanwhile, and several trainers are refused.
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as trainer:
        try:
            where = ("--pid", str(trainer.pid), "-o", str(tmp_path / "new.toml"))
            proposed = daemon.command("config", "init", "--force", *where)
        finally:
            trainer.kill()
    assert WORDS[how] in proposed.stdout + proposed.stderr, proposed.stdout + proposed.stderr
