"""ray_job.py against a real Ray: what it does with exit codes, and that a stop reaches podwatch."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.engines.stand_in import StandIn
from tests.suites.ray.test_ray import ENVIRONMENT, PYTHON, RAY, SLOW, Clusters, head
from tests.support.ports import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "engines" / "ray_job.py"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not RAY.exists(), reason="needs ray, which could not be installed: make test-ray"),
]


class Jobs:
    def __init__(self, directory: Path, url: str, podwatch: StandIn) -> None:
        self._directory, self._url, self.podwatch = directory, url, podwatch

    def start(self, codes: str) -> "subprocess.Popen[bytes]":
        self.podwatch.ends_with(codes)
        environ = {**os.environ, **ENVIRONMENT, "PAUSE": "0"}
        return subprocess.Popen([PYTHON, EXAMPLE, self._url], cwd=self._directory, env=environ)

    def stop(self) -> None:
        """`ray job stop` of the one that runs, without waiting."""
        with urllib.request.urlopen(f"{self._url}/api/jobs/", timeout=30) as answer:
            (job,) = [j["submission_id"] for j in json.load(answer) if j["status"] == "RUNNING"]
        environ = {**os.environ, **ENVIRONMENT}
        subprocess.run(
            [RAY, "job", "stop", "--no-wait", "--address", self._url, job], env=environ, check=True, timeout=SLOW
        )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    clusters, base = Clusters(), tmp_path_factory.mktemp("jobs")
    podwatch = StandIn(base / "stand-in")
    work = base / "work"
    work.mkdir()
    (work / "podwatch.toml").touch()
    port, directory = free_port(), clusters.directory()
    command = [word for word in head(directory, free_port()) if word != "--include-dashboard=false"]
    environ = {**os.environ, **ENVIRONMENT, "PATH": f"{podwatch.bin}:{os.environ['PATH']}"}
    try:
        subprocess.run([*command, "--include-dashboard=true", f"--dashboard-port={port}", "--num-gpus=2"], env=environ,
                       check=True, capture_output=True, timeout=SLOW)  # fmt: skip
        yield Jobs(work, f"http://127.0.0.1:{port}", podwatch)
    finally:
        clusters.close()


@pytest.mark.parametrize(("codes", "starts", "code"), [("86 86 0", 3, 0), ("65", 1, 65), ("69", 1, 69)])
def test_only_86_is_submitted_again(jobs: Jobs, codes: str, starts: int, code: int) -> None:
    assert jobs.start(codes).wait(SLOW) == code
    assert jobs.podwatch.starts == ["run --job -c podwatch.toml --set recovery.end_grace=110s"] * starts


def test_a_stop_reaches_podwatch_and_is_not_undone(jobs: Jobs) -> None:
    started = jobs.start("wait 0")
    jobs.podwatch.wait_started(SLOW)
    time.sleep(1)  # its handlers
    jobs.stop()
    assert started.wait(SLOW) == 1
    assert jobs.podwatch.signals == [signal.SIGTERM.name]
    assert len(jobs.podwatch.starts) == 1
