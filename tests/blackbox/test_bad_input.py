"""Everything a person can get wrong: one clear line (what, where, what to do), the right exit code, nothing lost."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import (
    confirmed,
    guards_without_store,
    kill_engine,
    reasons,
    says,
    starts_without_store,
    status,
    wait_reason,
    would_miss_the_engine,
)
from tests.support.b2server import KEY, KEY_ID, B2Server
from tests.support.checkpoints import write_prime_rl_step
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig
from tests.support.strangers import public_directory

NOBODY = 65534
as_root = pytest.mark.root


def fails(daemon: DaemonProcess, code: int, *words: str) -> str:
    """``podwatch run`` ends with this code and says one line with all the words in it."""
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(60) == code, daemon.tail()
    said = [line for line in daemon.log.read_text().splitlines() if line.startswith("podwatch: ")]
    assert len(said) == 1, daemon.tail()
    for word in words:
        assert word in said[0], said[0]
    return said[0]


# -- configuration ----------------------------------------------------------------------------------------------------


def test_missing_file(rig: Rig) -> None:
    daemon = rig.daemon()
    daemon.config.unlink()
    fails(daemon, 78, "does not exist", str(daemon.config), "podwatch config init")


def test_malformed_file(rig: Rig) -> None:
    daemon = rig.daemon()
    daemon.config.write_text(rig.config() + "[gpu\n")
    fails(daemon, 78, str(daemon.config), "line")


def test_unknown_key_and_bad_unit(rig: Rig) -> None:
    daemon = rig.daemon(gpu__hol="2s")
    fails(daemon, 78, 'unknown key "hol" in [gpu]', 'did you mean "hold"', str(daemon.config))
    daemon.log.unlink()
    daemon.config.write_text(rig.config(gpu__release_wait="8 parsecs"))
    fails(daemon, 78, '"release_wait" in [gpu]', "8 parsecs", str(daemon.config))


@pytest.mark.slow
def test_broken_at_restart_with_a_last_good_copy(rig: Rig) -> None:
    daemon = rig.daemon().start()
    confirmed(daemon)
    pid = rig.trainer_pid
    daemon.stop()
    daemon.config.write_text("run_id = [broken\n" + rig.config())
    daemon.start()
    stale = wait_reason(daemon, "config-stale")
    assert stale["severity"] == "critical"
    assert str(daemon.config) in stale["suggestion"]
    assert rig.trainer_pid == pid, "and the guard goes on"
    says(daemon, 2)


# -- directories and permission ---------------------------------------------------------------------------------------


def test_output_directory_that_does_not_exist_yet(rig: Rig) -> None:
    shutil.rmtree(rig.output.parent)
    daemon = rig.daemon(trainer__cwd=str(rig.root)).start()
    confirmed(daemon)
    daemon.wait_event("checkpoint-complete", 30)
    assert rig.output.is_dir()


@pytest.fixture
def open_rig(nvml_library: Path) -> Iterator[Rig]:
    """One that every user can reach. Each pytest that starts on this machine closes the directories of all others."""
    with public_directory() as directory:
        rig = Rig(directory / "pod", nvml_library)
        for path in (rig.control, rig.output.parent):
            path.chmod(0o777)
        yield rig
        rig.close()


@as_root
@pytest.mark.slow
def test_state_directory_that_may_not_be_written(open_rig: Rig) -> None:
    rig = open_rig
    (rig.root / "state").mkdir(mode=0o755)
    daemon = _as_nobody(rig, rig.daemon()).start()
    found = daemon.wait_for(lambda: reasons(daemon).get("state-unavailable"), 20, "it guards, and says what is wrong")
    assert str(rig.root / "state") in found["summary"]
    assert "set state_dir" in found["suggestion"]
    assert not rig.starts
    assert daemon.stop() == 0


@as_root
@pytest.mark.slow
def test_output_directory_that_may_not_be_read(open_rig: Rig) -> None:
    """A guard that cannot see the checkpoints says so; it does not take them for gone, and starts nothing fresh."""
    rig = open_rig
    write_prime_rl_step(rig.output, 5)
    rig.output.chmod(0o700)
    # Where that user can start no Python, the GPUs are not seen, and a start waits for their release first.
    daemon = _as_nobody(rig, rig.daemon(state_dir=str(rig.root / "own"), gpu__release_wait="1s"))
    (rig.root / "own").mkdir(mode=0o700)
    os.chown(rig.root / "own", NOBODY, NOBODY)
    daemon.start()
    daemon.wait_for(lambda: str(rig.output) in json.dumps(reasons(daemon).get("blocked")), 20, "the directory is named")
    assert "Permission denied" in reasons(daemon)["blocked"]["summary"]
    daemon.wait_for(lambda: "podwatch's user" in reasons(daemon)["blocked"]["suggestion"], 10, "what to do")
    time.sleep(0.5)
    assert not rig.starts
    assert (rig.output / "checkpoints" / "step_5" / "trainer" / ".metadata").exists()


def _as_nobody(rig: Rig, daemon: DaemonProcess) -> DaemonProcess:
    """Run it as an unprivileged user, where that user can reach the interpreter and this checkout at all."""
    daemon.wrapper = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--")
    probe = [*daemon.wrapper, sys.executable, "-c", "import podwatch.cli.root"]
    if shutil.which("setpriv") is None or subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("another user cannot run this Python or read this checkout (is it below /root?)")
    daemon.runtime.mkdir(exist_ok=True)
    os.chown(daemon.runtime, NOBODY, NOBODY)
    for path in (daemon.config, *daemon.config.parent.glob("test-times.toml")):
        os.chown(path, NOBODY, NOBODY)
    return daemon


# -- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["command", "cwd"])
def test_a_command_or_directory_that_does_not_exist(rig: Rig, what: str) -> None:
    changes: dict[str, Any] = {"trainer__command": ["no-such-trainer", "--x"]}
    if what == "cwd":
        changes = {"trainer__cwd": str(rig.root / "no-such-directory")}
    daemon = rig.daemon(**changes).start()
    gave_up = daemon.wait_event("gave-up", 30)
    assert gave_up["level"] == "critical"
    told = " ".join(str(e["event"]) for e in daemon.events() if e["level"] == "critical")
    assert "no-such" in told, told
    daemon.wait_for(lambda: "no-such" in json.dumps(reasons(daemon).get("gave-up")), 10, "status says why")
    says(daemon, 2)
    assert daemon.process is not None
    assert daemon.process.poll() is None, "checkpoints stay guarded"


@pytest.mark.slow
def test_two_podwatches_on_one_run(rig: Rig) -> None:
    first = rig.daemon().start()
    confirmed(first)
    second = DaemonProcess(rig.root / "second", rig.config(), first.environ)
    assert first.process is not None
    fails(second, 75, f"process {first.process.pid}", rig.run_id)
    assert len(rig.starts) == 1
    assert first.process.poll() is None


@pytest.mark.slow
def test_health_port_already_taken(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        daemon = rig.daemon(http__port=port).start()
        url = status(daemon)["daemon"]["http_url"]
        assert not url.endswith(f":{port}")
        confirmed(daemon)


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_corrupt_state_database(rig: Rig) -> None:
    daemon = rig.daemon().start()
    confirmed(daemon)
    pid = rig.trainer_pid
    daemon.stop()
    database = rig.root / "state" / rig.run_id / "journal.sqlite"
    database.write_bytes(b"this is not a database" * 1000)
    seen = len(daemon.events())
    daemon.start()
    said = daemon.wait_event("state-rebuilt", 20, after=seen)
    assert "journal.sqlite.corrupt-1" in said["event"]
    assert database.with_name("journal.sqlite.corrupt-1").exists()
    daemon.wait_event("trainer-adopted", 20, after=seen)
    assert rig.trainer_pid == pid


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("a small filesystem cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def _fill(place: Path) -> None:
    with (place / "filler").open("wb", buffering=0) as out, contextlib.suppress(OSError):
        while out.write(b"x" * 4096):
            pass


@as_root
@pytest.mark.slow
def test_full_disk_at_the_very_first_start(rig: Rig, small_disk: Path) -> None:
    _fill(small_disk)
    daemon = rig.daemon(state_dir=str(small_disk / "state")).start()
    found = daemon.wait_for(lambda: reasons(daemon).get("state-unavailable"), 20, "it guards, and says what is wrong")
    assert str(small_disk) in found["summary"]
    assert "space" in found["suggestion"]
    assert not rig.starts
    assert daemon.stop() == 0


@as_root
@pytest.mark.slow
def test_full_disk_at_a_later_start(rig: Rig, small_disk: Path) -> None:
    """The guard matters most when the disk is full: it takes the trainer over all the same."""
    daemon = rig.daemon(state_dir=str(small_disk / "state")).start()
    confirmed(daemon)
    pid = rig.trainer_pid
    daemon.stop()
    _fill(small_disk)
    seen = len(daemon.events())
    daemon.start()
    daemon.wait_event("trainer-adopted", 20, after=seen)
    assert rig.trainer_pid == pid
    daemon.wait_for(lambda: would_miss_the_engine(daemon), 20, "armed, by itself or by what the first one learned")
    daemon.wait_for(lambda: rig.saved, 20, "something to resume from")
    kill_engine(rig)
    daemon.wait_event("incident-closed", 30, after=seen)
    assert rig.trainer_pid != pid


# -- GPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_nvml(rig: Rig) -> None:
    daemon = rig.daemon(gpu__release_wait="0.5s")
    daemon.environ.pop("LD_LIBRARY_PATH")
    daemon.start()
    daemon.wait_event("sensor-changed", 20, sensor="gpus", state="absent")
    confirmed(daemon)
    daemon.wait_for(lambda: daemon.command("status").returncode in (1, 2), 20, "status answers")


# -- store ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def b2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[B2Server]:
    with B2Server(tmp_path_factory.mktemp("b2")) as server:
        yield server


def b2_environment(server: B2Server) -> dict[str, str]:
    return {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("what", ["wrong key", "no such bucket", "half a key", "no key"])
@pytest.mark.slow
def test_a_store_that_cannot_be_used_does_not_remove_the_guard(rig: Rig, b2: B2Server, what: str) -> None:
    environ, bucket, words, code = b2_environment(b2), "test-bucket", "", 69
    if what == "wrong key":
        environ["B2_APPLICATION_KEY"] = "wrong-secret-never-to-be-seen"
        words = "store refuses the key"
    elif what == "no such bucket":
        bucket = words = "no-such-bucket"
    elif what == "half a key":
        del environ["B2_APPLICATION_KEY"]
        words, code = "half of the store's key is missing", 78
    else:
        environ, words, code = {}, "the store has no credentials", 78
    daemon = rig.daemon(environ, sync__store=f"b2://{bucket}").start()
    # Training does not begin by itself, because the store may hold this run; a person's word is enough.
    daemon.wait_for(lambda: "`podwatch start`" in json.dumps(reasons(daemon).get("blocked")), 20, "what to do")
    assert "podwatch cannot read the store" in reasons(daemon)["blocked"]["summary"]
    assert not rig.starts
    if what == "wrong key":
        guards_without_store(rig, daemon, words)
        says(daemon, 2)
    else:
        starts_without_store(daemon)
        daemon.wait_event("checkpoint-complete", 20)
        reason = wait_reason(daemon, "store-unavailable")
        assert (reason["severity"], words in reason["summary"]) == ("critical", True), reason
    sync = daemon.command("sync", "--wait")
    assert sync.returncode == code, sync.stderr
    assert len(sync.stderr.splitlines()) == 1
    assert sync.stderr.startswith("podwatch: ")
    assert "never-to-be-seen" not in daemon.log.read_text() + sync.stderr


@pytest.mark.slow
def test_a_store_beside_the_checkpoints_is_refused(rig: Rig) -> None:
    daemon = rig.daemon(sync__store=f"file://{rig.root}/backup").start()
    confirmed(daemon)
    reason = wait_reason(daemon, "not-backed-up")
    assert reason["severity"] == "critical"
    assert "same filesystem" in reason["summary"]
    says(daemon, 2)
    assert not (rig.root / "backup").exists()


NO_INOTIFY = ("unshare", "--user", "--map-root-user", "sh", "-c",
              'echo 0 > /proc/sys/user/max_inotify_instances && exec "$@"', "sh")  # fmt: skip


@pytest.mark.skipif(
    subprocess.run([*NO_INOTIFY, "true"], capture_output=True, check=False).returncode != 0,
    reason="needs a user namespace of its own",
)
@pytest.mark.slow
def test_without_file_events_the_rescans_find_the_saves_and_it_is_said(rig: Rig) -> None:
    daemon = rig.daemon()
    daemon.wrapper = NO_INOTIFY
    daemon.start()
    warned = daemon.wait_event("config-warning", 20)["event"]
    assert "file events are not available" in warned
    assert "by rescans alone" in warned
    daemon.wait_event("checkpoint-complete", 30)
    assert sum("file events" in e["event"] for e in daemon.events()) == 1, "said once"
