"""podwatch in a container: the image that the Dockerfile makes, podwatch as PID 1, and ``--detach`` where it is not."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.container.container import LOG, SUPERVISOR, Container, configuration
from tests.suites.container.images import IMAGE_MISSING, MISSING, Rootfs, built_image, own_root

pytestmark = [pytest.mark.timeout(1200), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module", params=["host", "image"])
def rootfs(request: pytest.FixtureRequest) -> Iterator[Rootfs]:
    if request.param == "image" and IMAGE_MISSING:
        pytest.skip(IMAGE_MISSING)
    with built_image() if request.param == "image" else own_root() as made:
        yield made


@pytest.fixture
def container(rootfs: Rootfs, tmp_path: Path) -> Iterator[Container]:
    made = Container(rootfs, tmp_path / "container.log")
    yield made
    made.close()


def zombies(container: Container) -> list[str]:
    return [command for state, command, _ in container.processes().values() if state == "Z"]


def test_the_image_starts_podwatch_from_an_environment_of_its_own(rootfs: Rootfs, container: Container) -> None:
    if not rootfs.image:
        pytest.skip("about the image only")
    assert rootfs.argv == ("podwatch", "run")
    assert rootfs.image["Volumes"] == {"/var/lib/podwatch": {}}
    assert rootfs.image["Healthcheck"]["Test"][0] == "CMD-SHELL"
    assert "9477/tcp" in rootfs.image["ExposedPorts"]
    assert not (rootfs.path / "tmp/podwatch").exists()
    container.start("sleep", "600")
    assert re.fullmatch(r"podwatch \d+\.\d+\.\d+\n", container.podwatch("--version", check=True))
    assert "No module named 'podwatch'" in container.run("/usr/bin/python3", "-c", "import podwatch", check=False)
    # The unit is packaged: installing from a wheel shows it, and says what to do where no systemd runs.
    assert "ExecStart=/opt/podwatch/bin/podwatch run" in container.podwatch("install", "--dry-run", check=True)
    assert "systemd does not run here" in container.podwatch("install")


def test_pid_1_reaps_restarts_its_daemon_and_answers(container: Container) -> None:
    container.start()
    trainer = container.wait_running()
    first = container.processes()[1]
    assert "supervise.py init" in first[1], first
    assert container.find("sleep 987") == 0
    container.run("sh", "-c", "sh -c 'sleep 0.3 & sleep 987 & kill -9 $!; kill -9 $$'", check=False)
    container.wait(lambda: not container.find("sleep ") and not zombies(container), 10, "orphans are reaped")

    daemon = container.daemon
    container.signal("9", daemon)
    container.wait(lambda: container.daemon not in (0, daemon), 30, "PID 1 starts the daemon again")
    container.wait(lambda: container.status().get("running"), 30, "the new daemon answers")
    assert container.wait_running() == trainer
    assert "took over" in container.status()["daemon"]["opening"]
    container.wait(lambda: not zombies(container), 20, "no zombie stays")
    shown = container.podwatch("status")
    assert "pod-1" in shown
    assert "NOT RUNNING" not in shown
    plugin = container.podwatch("status", "--plugin")
    assert plugin.startswith(("PODWATCH OK", "PODWATCH WARNING")), plugin
    if container.rootfs.image:
        _, probe = container.rootfs.image["Healthcheck"]["Test"]
        container.run("sh", "-c", probe)
        container.signal("STOP", container.daemon)
        unwell = container.run("sh", "-c", f"{probe}; echo code=$?", check=False)
        assert "code=0" not in unwell, "a daemon that does not answer is not healthy"


def test_a_hung_daemon_is_replaced_by_pid_1(container: Container) -> None:
    if container.rootfs.image:
        pytest.skip("the watchdog waits 60 s: once is enough")
    container.start()
    trainer, daemon = container.wait_running(), container.daemon
    container.signal("STOP", daemon)
    container.wait(lambda: container.daemon not in (0, daemon), 100, "PID 1 replaces the hung daemon")
    assert "no heartbeat" in container.said()
    assert container.wait_running() == trainer


def test_stopping_the_container_is_a_preemption(container: Container) -> None:
    container.start()
    container.wait_running()
    container.wait(lambda: container.run("find", "/srv/store", "-name", "latest.json"), 30, "a published checkpoint")
    # The store's tmpfs goes with the container: hold on to what the farewell writes there.
    store = os.open(f"/proc/{container.first}/root/srv/store", os.O_RDONLY | os.O_DIRECTORY)
    began = time.monotonic()
    try:
        code = container.stop()
        took = time.monotonic() - began
        with os.fdopen(os.open("pod-1/podwatch/heartbeat.json", os.O_RDONLY, dir_fd=store)) as stream:
            heartbeat = json.load(stream)
    finally:
        os.close(store)
    assert code == 0, container.said()
    assert took < 9.0, "docker stop gives ten seconds"
    assert heartbeat["state"] == "preempted"
    assert "requests training to end" in container.said()
    (ended,) = Path(container.rootfs.path, SUPERVISOR.lstrip("/")).glob("exit-*.json")
    # 143 is the fake trainer's own answer to SIGTERM; signal 15, that a second one came while it was leaving. Not 9.
    document = json.loads(ended.read_text())
    assert document["code"] == 143 or document["signal"] == signal.SIGTERM, document
    print(f"\nPID 1: SIGTERM to the container's end {took:.1f} s")


def test_as_a_job_pid_1_ends_with_the_run_and_returns_its_code(container: Container) -> None:
    container.configure(configuration(container.rootfs).replace('"10"]', '"10", "--max-steps", "20"]'))
    container.start(*container.rootfs.argv, "--job")
    assert container.outer.wait(180) == 0, container.said()
    assert "The run is finished" in container.said()
    assert "step 20 is in the store" in container.said()


def test_as_a_job_a_stop_of_the_container_is_86_even_with_other_processes_in_it(container: Container) -> None:
    container.start(*container.rootfs.argv, "--job")
    container.wait_running()
    container.run("sh", "-c", "(trap '' TERM; sleep 987) >/dev/null 2>&1 </dev/null & :")  # an orphan that does not end
    container.wait(lambda: container.processes()[container.find("sleep 987")][2] == 1, 20, "it is a child of PID 1")
    os.kill(container.first, signal.SIGTERM)
    began = time.monotonic()
    assert container.stop() == 86, container.said()
    assert time.monotonic() - began < 9.5, "docker stop gives ten seconds"
    (ended,) = Path(container.rootfs.path, SUPERVISOR.lstrip("/")).glob("exit-*.json")
    document = json.loads(ended.read_text())
    assert document["code"] == 143 or document["signal"] == signal.SIGTERM, document


def test_a_bad_configuration_ends_with_78_and_one_line(container: Container) -> None:
    container.write("/etc/podwatch/podwatch.toml", 'run_id = "x"\nnonsense = 1\n')
    container.start()
    assert container.outer.wait(30) == 78
    lines = container.log.read_text().strip().splitlines()
    assert "nonsense" in container.log.read_text()
    assert "Traceback" not in container.log.read_text()
    assert lines[0].startswith("podwatch: "), lines


def test_detach_where_pid_1_is_somebody_else(container: Container) -> None:
    """As on most rented pods: PID 1 is a shell or sshd, and nobody restarts anything."""
    container.start("sleep", "3600")
    said = container.podwatch("run", "--detach", check=True)
    assert re.search(r"podwatch runs in the background \(init \d+\); log: " + LOG, said), said
    trainer, init, daemon = container.wait_running(), container.init, container.daemon
    again = container.podwatch("run", "--detach")
    assert "another podwatch" in again or "already" in again, again
    assert container.init == init

    container.signal("9", daemon)
    container.wait(lambda: container.daemon not in (0, daemon), 30, "init starts the daemon again")
    assert container.wait_running() == trainer
    assert "signal 9" in container.said()

    container.signal("TERM", init)
    container.wait(lambda: not container.init and not container.daemon, 30, "podwatch leaves")
    assert container.trainer == trainer
    assert "training continues UNGUARDED" in container.said()
    document = container.status()
    assert not document["running"]

    assert container.podwatch("run", "--detach", check=True)
    assert container.wait_running() == trainer
    assert container.podwatch("stop-training", check=True)  # answers when the stop is durable and begun
    container.wait(lambda: not container.trainer, 20, "training is stopped")
    os.kill(container.first, signal.SIGKILL)
