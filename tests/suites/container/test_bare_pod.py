"""A pod dies in the middle of a save; a bare pod with nothing but podwatch's wheels and a key continues its run, which
ends in the same weights as one that nothing interrupted. Needs root and torch: `make test-torch`.

The waits of the lease are shortened (settings in podwatch.toml); PODWATCH_LONG_TESTS=1 measures with the defaults.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_dead_man import Service
from tests.suites.container.container import TIMES, Container
from tests.suites.container.images import MISSING, REPO, Rootfs, own_root
from tests.support import own_times
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import PATIENCE
from tests.support.ports import free_port

WITHOUT = "" if find_spec("torch") else "needs torch: run it with `make test-torch`"
pytestmark = [pytest.mark.timeout(1800), pytest.mark.skipif(bool(WITHOUT or MISSING), reason=WITHOUT or MISSING)]

RUN, STEPS, INTERVAL = "tiny", 60, 10
OUTPUT = "/srv/work/outputs"
PODWATCH = "/opt/podwatch/bin/podwatch"
LONG = bool(os.environ.get("PODWATCH_LONG_TESTS"))
PATIENCE_SECONDS, CLAIM_SECONDS, DEAD_SECONDS = (300, 90, 300) if LONG else (20, 3, 20)
SCRIPT, ENV_FILE, URLS = "/root/train.sh", "/root/train.env", "/root/heartbeat.urls"


def command(output: str | Path, port: int) -> list[str]:
    return [sys.executable, str(REPO / "examples/tiny-rl/rl.py"), "--output-dir", str(output), "--layout", "A",
            "--port", str(port), "--max-steps", str(STEPS), "--ckpt", "--ckpt.interval", str(INTERVAL)]  # fmt: skip


def configuration() -> str:
    return f"""
run_id = "{RUN}"
[trainer]
layout = "prime-rl"
output_dir = "{OUTPUT}"
cwd = "/srv/work"
command = ["sh", "{SCRIPT}", "--step-time", "0.3", "--save-time", "2.5"]
env_file = "{ENV_FILE}"
max_steps = {STEPS}
stop_grace = "5s"
[checkpoints]
rescan = "0.5s"
settle = "0.5s"
[sync]
store = "b2://{BUCKET}"
part_size = "5MB"
heartbeat = "5s"
holder_patience = "{PATIENCE_SECONDS}s"
claim_wait = "{CLAIM_SECONDS}s"
[notify]
heartbeat_urls_file = "{URLS}"
heartbeat_every = "5s"
"""


class Pod(Container):
    """A container with the trainer's image (torch, the example) and podwatch's wheels, but without podwatch."""

    def __init__(self, rootfs: Rootfs, wheels: Path, log: Path, environment: dict[str, str]) -> None:
        super().__init__(replace(rootfs, podwatch=PODWATCH), log)
        (rootfs.path / "etc/podwatch/podwatch.toml").unlink()
        (rootfs.path / "etc/podwatch").rmdir()
        self.write(TIMES, own_times.split(configuration())[1])
        subprocess.run(["cp", "-r", str(wheels), str(rootfs.path / "srv/wheels")], check=True)
        self._environment = environment

    def boot(self, *commands: str) -> None:
        """As a provider starts it: variables, then one shell text."""
        variables = [f"export {name}='{value}'" for name, value in self._environment.items()]
        python = Path(sys.executable).resolve()
        install = f"{python} -m venv /opt/podwatch && /opt/podwatch/bin/pip install -q --no-index --no-cache-dir"
        lines = [*variables, f"{install} --find-links /srv/wheels podwatch", *commands]
        self.write("/srv/start.sh", "\n".join(["set -e", *lines, ""]))
        self.start("sh", "/srv/start.sh")

    def destroy(self) -> None:
        """PID 1 is killed, and the kernel everything else: nobody says goodbye."""
        self.close()

    def file(self, path: str) -> Path:
        return self.rootfs.path / path.lstrip("/")

    def saving(self) -> bool:
        """Whether a save after the first checkpoint is half written."""
        steps = self.file(OUTPUT).glob("checkpoints/step_*/trainer")
        return any(
            (d / "__0_0.distcp").exists() and not (d / ".metadata").exists() and int(d.parent.name[5:]) > INTERVAL
            for d in steps
        )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wheels")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(made), str(REPO)], check=True)
    assert len(list(made.glob("podwatch-*.whl"))) == 1
    return made


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def shown(command: list[str], key: dict[str, str]) -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("PODWATCH_")}
    return subprocess.run(command, capture_output=True, text=True, env={**own, **key}).stdout


def until(condition: Callable[[], Any], seconds: float, what: str) -> float:
    """Seconds until it was true."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > PATIENCE * seconds:
            raise AssertionError(f"not within {PATIENCE * seconds:g} s: {what}")
        time.sleep(0.2)
    return time.monotonic() - begun


def test_a_bare_pod_continues_a_run_whose_pod_is_gone(wheels: Path, tmp_path: Path, stack: ExitStack) -> None:
    reference = tmp_path / "reference"
    subprocess.run(command(reference, free_port()), check=True, cwd=tmp_path, capture_output=True, timeout=300)
    server = stack.enter_context(B2Server(tmp_path / "b2"))
    service = Service()
    stack.callback(service.close)
    key = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url}

    def check() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "podwatch", "runs", "check", RUN, "--store", f"b2://{BUCKET}",
             "--dead-after", f"{DEAD_SECONDS}s"], capture_output=True, text=True, env={**os.environ, **key},
        )  # fmt: skip
        return done.returncode, done.stdout

    a = Pod(stack.enter_context(own_root()), wheels, tmp_path / "a.log", key)
    stack.callback(a.close)
    words = " ".join(command(OUTPUT, free_port()))
    a.write(SCRIPT, f'exec {words} --seed "$SEED_TOKEN" "$@"\n')
    a.file(SCRIPT).chmod(0o644)  # its owner's alone would be taken for a secret
    a.write(ENV_FILE, "SEED_TOKEN=1\n")
    a.write(URLS, f"{service.url}\n")
    a.file("/etc/podwatch").mkdir()
    a.configure(configuration())
    a.boot(f"exec {PODWATCH} run")
    first = a.file(f"{OUTPUT}/checkpoints/step_{INTERVAL}/trainer/.metadata")
    a.wait(first.exists, 240, "pod A has saved a checkpoint")
    trainer = a.find("tiny-rl/trainer.py")
    a.signal("STOP", trainer)  # however slow this machine is: the next save comes after the upload
    a.wait(lambda: re.search(r"step \d+ is stored", check()[1]), 240, "pod A has stored a checkpoint")
    stored = [sys.executable, "-m", "podwatch", "bootstrap", f"b2://{BUCKET}", RUN, "--dir", str(tmp_path / "etc")]
    a.wait(lambda: "digest" in shown(stored, key), 60, "pod A has stored its start")
    a.wait(lambda: service.seen, 60, "the dead-man's switch is called")
    a.signal("CONT", trainer)
    a.wait(a.saving, 60, "pod A is in the middle of a save")
    a.destroy()
    died = time.monotonic()

    noticed = until(lambda: check()[0] == 2, DEAD_SECONDS + 30, "the outside notices")
    code, line = check()
    assert code == 2, line
    assert "dead: no heartbeat from pod pod-under-test" in line
    silent = len(service.seen)
    assert died - time.monotonic() < -10.0
    time.sleep(6.0)
    assert len(service.seen) == silent, "the dead-man's switch is silent"

    begun = time.monotonic()
    b = Pod(stack.enter_context(own_root()), wheels, tmp_path / "b.log", {**key, "SEED_TOKEN": "1"})
    stack.callback(b.close)
    assert not b.file("/etc/podwatch").exists()
    assert not b.file(SCRIPT).exists()
    given = f"(umask 077; mkdir -p {Path(URLS).parent}; echo {service.url} > {URLS})"
    b.boot(given, f"exec {PODWATCH} bootstrap b2://{BUCKET} {RUN} --trust")
    b.wait(lambda: b.file("/etc/podwatch/podwatch.toml").exists(), 240, "podwatch.toml is written")
    placed = time.monotonic() - begun
    b.wait(lambda: b.status().get("training", {}).get("state") == "running", DEAD_SECONDS + 300, "training runs on B")
    trains, lost = time.monotonic() - begun, time.monotonic() - died
    b.wait(lambda: check()[0] in (0, 1), 60, "the outside sees pod B")
    b.wait(lambda: b.file(f"{OUTPUT}/final.pt").exists(), 300, "the run is finished")

    import torch

    want, got = (torch.load(p, weights_only=True) for p in (reference / "final.pt", b.file(f"{OUTPUT}/final.pt")))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert b.read(ENV_FILE) == "SEED_TOKEN=1\n"
    assert not [p for p in (tmp_path / "b2").rglob("*") if p.is_file() and b"T0K3N-4711" in p.read_bytes()]
    assert server.violations() == []
    assert len(service.seen) > silent, "pod B calls the dead-man's switch"
    (resumed,) = set(re.findall(r"Resumed from \S+/(step_\d+)", b.read(f"{OUTPUT}/logs/trainer.log")))
    assert int(resumed[5:]) >= INTERVAL
    print(
        f"\npod lost -> critical from outside {noticed:.0f} s (bound {DEAD_SECONDS} s without a heartbeat); bare pod ->"
        f" files placed {placed:.0f} s -> training {trains:.0f} s, resumed from {resumed};"
        f" pod lost -> training {lost:.0f} s with a lease that waits {PATIENCE_SECONDS} s + {CLAIM_SECONDS} s (defaults"
        " 300 s + 90 s, with which at most 480 s are to pass). Weights are bit-identical."
    )
