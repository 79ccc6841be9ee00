"""``podwatch check``: each thing that would spoil a night is found before it, with the fix."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from podwatch.app.paths_and_run_lock import workspace_of
from podwatch.checkpoints.command import Command
from podwatch.checkpoints.trainers import make_layout
from podwatch.cli import detect_machine
from podwatch.cli.check import before_a_start, examine, machine, training_command
from podwatch.cli.check.machine import gpus
from podwatch.cli.check.report import Line, failed, sets_of
from podwatch.cli.check.store import _clock, store
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError
from podwatch.domain.run import Pause
from podwatch.domain.snapshot import GpuSample
from podwatch.recovery.run_file import RunFile
from podwatch.system.clock import SystemClock
from tests.support.b2server import BUCKET, B2Server

GIB = 1 << 30


def made(root: Path, **sections: Any) -> Settings:
    (root / "outputs").mkdir(exist_ok=True)
    trainer = {"layout": "prime-rl", "output_dir": root / "outputs", "command": ["uv", "run", "rl", "@", "c.toml"]}
    trainer |= sections.pop("trainer", {})
    return Settings.model_validate({"run_id": "r", "state_dir": root / "state", "trainer": trainer, **sections})


def level(lines: Iterator[Line], name: str = "") -> dict[str, str]:
    """Level -> joined texts and fixes."""
    found: dict[str, str] = {}
    for line in lines:
        if name in ("", line.name):
            found[line.level] = f"{found.get(line.level, '')}{line.text} | {line.fix}\n"
        assert line.fix or line.level == "ok", line
    return found


def program(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


# -- a start


def test_the_program_is_looked_for_on_the_path_that_training_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = program(tmp_path / "mine", "uv").parent, tmp_path / "theirs"
    monkeypatch.setenv("PATH", f"{mine}:/usr/bin:/bin")
    assert f"{mine}/uv" in level(training_command.command(made(tmp_path)))["ok"]
    secrets = tmp_path / "env"
    secrets.write_text(f"PATH={theirs}:/usr/bin\n")
    secrets.chmod(0o600)
    refused = level(training_command.command(made(tmp_path, trainer={"env_file": secrets})))
    assert "which is not in training's PATH" in refused["fail"]
    assert str(mine) in refused["fail"]
    program(theirs, "uv")
    assert f"{theirs}/uv" in level(training_command.command(made(tmp_path, trainer={"env_file": secrets})))["ok"]
    unknown = level(training_command.command(made(tmp_path, trainer={"user": "nobody-of-that-name"})))
    assert "user nobody-of-that-name not found" in unknown["fail"]


@pytest.mark.parametrize(
    ("argv", "hidden"),
    [
        (("sh", "-c", "train | tee log"), True),
        (("/bin/bash", "-lc", "train 2>&1 | tee log"), True),
        (("bash", "-c", "train |& tee log"), True),
        (("bash", "-c", "set -o pipefail; train | tee log"), False),
        (("bash", "-o", "pipefail", "-c", "train | tee log"), False),
        (("sh", "-c", "train || exit 3"), False),
        (("sh", "-c", "train --pattern 'a|b'"), False),
        (("python", "-c", "print(1 | 2)"), False),
        (("sh", "train.sh"), False),
    ],
)
def test_a_pipe_that_hides_a_crash(argv: tuple[str, ...], hidden: bool) -> None:
    assert Command(argv).hides_exit_code() is hidden


def test_a_wandb_key_or_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "no W&B key" in level(training_command.keys(made(tmp_path)))["warn"]
    secrets = tmp_path / "env"
    secrets.write_text("WANDB_API_KEY=0123456789abcdef\n")
    secrets.chmod(0o600)
    lines = list(training_command.keys(made(tmp_path, trainer={"env_file": secrets})))
    assert [x.level for x in lines] == ["ok"]
    assert "0123456789abcdef" not in str(lines)
    assert "offline" in level(training_command.keys(made(tmp_path, trainer={"env": {"WANDB_MODE": "offline"}})))["ok"]
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert "key found" in level(training_command.keys(made(tmp_path)))["ok"]


def test_the_resume_command_is_tried_before_the_night(tmp_path: Path) -> None:
    settings = made(tmp_path, trainer={"layout": "hf", "command": ["python", "train.py"]})
    step = tmp_path / "outputs/checkpoint-10"
    step.mkdir()
    (step / "trainer_state.json").write_text('{"global_step": 10}')
    prime = made(tmp_path)
    refused = level(training_command.layout(prime, sets_of(prime)), "resume")
    assert "prime-rl version" in refused["warn"], "no checkpoint: not sure yet"
    with_one = level(training_command._resume(prime, make_layout(prime), 10))
    assert "from step 10: podwatch cannot determine" in with_one["fail"], (
        "a preset that refuses is known now, not at the restart"
    )
    given = made(tmp_path, trainer={"resume_args": ["--ckpt.resume-step", "{step}"]})
    assert "--ckpt.resume-step 1" in level(training_command.layout(given, sets_of(given)), "resume")["ok"]
    assert "set in the configuration" in level(training_command.layout(settings, sets_of(settings)), "layout")["ok"]
    unknown = made(tmp_path, trainer={"layout": "auto", "command": ["./mine"], "output_dir": tmp_path / "nothing"})
    texts = [x.text for x in examine(unknown) if x.level == "fail" and "recognizes" in x.text]
    assert len(texts) == 1, "said once, though several checks need the layout"


def test_packages_shared_with_the_trainer(tmp_path: Path) -> None:
    shared = level(training_command.packages(made(tmp_path, trainer={"command": [sys.executable, "train.py"]})))
    assert "in the trainer's environment" in shared["warn"]
    apart = level(training_command.packages(made(tmp_path, trainer={"command": ["/bin/sh", "train.sh"]})))
    assert "has its own environment" in apart["ok"]


# -- the machine


def test_foreign_memory_on_a_gpu_is_found_before_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NVML stand-in has tests of its own; here it is the judgement."""
    used = {0: 60 * GIB, 1: GIB // 2}
    cards = [
        GpuSample(n, f"GPU-{n}", "H200", memory_used_bytes=use, memory_total_bytes=140 * GIB) for n, use in used.items()
    ]
    monkeypatch.setattr(detect_machine, "read_gpus", lambda: cards)
    settings = made(tmp_path, gpu={"inference": [0], "trainer": [1]})
    found = level(gpus(settings, ""))
    assert "GPU 0" in found["fail"]
    assert "no process that has a context there" in found["fail"]
    assert "GPU 1" in found["ok"]
    assert "fail" not in level(gpus(settings, "training is running"))
    assert "fail" not in level(gpus(made(tmp_path, gpu={"inference": [1]}), "")), "another run's card"
    assert "GPU 7 of [gpu] not found" in level(gpus(made(tmp_path, gpu={"inference": [7]}), ""))["fail"]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        settings = made(tmp_path, inference={"urls": [f"http://127.0.0.1:{server.getsockname()[1]}"]})
        assert "is in use" in level(machine.ports(settings, ""))["fail"]
        assert "ok" in level(machine.ports(settings, "training is running"))
    assert "is free" in level(machine.ports(settings, ""))["ok"]


def test_a_low_file_limit(tmp_path: Path) -> None:
    assert "65,536" in level(machine.limits(made(tmp_path, trainer={"nofile": 4096})))["warn"]


CHECK_LIMITS = """
import sys
from pathlib import Path
from podwatch.cli.check import machine
from podwatch.config.settings import Settings
settings = Settings.model_validate(
    {"run_id": "r", "state_dir": sys.argv[1], "trainer": {"layout": "hf", "output_dir": sys.argv[1] + "/out"}}
)
for line in machine.limits(settings):
    print(line.level, line.text)
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
@pytest.mark.parametrize("capable", [True, False])
def test_the_file_limit_is_tried(tmp_path: Path, capable: bool) -> None:
    """Root in a container without CAP_SYS_RESOURCE cannot pass the hard limit."""
    effective = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("CapEff:"))
    if capable and not int(effective.split()[1], 16) >> 24 & 1:
        pytest.skip("this machine's root has no CAP_SYS_RESOURCE")
    limited = ["sh", "-c", 'ulimit -Sn 20000 && ulimit -Hn 20000 && exec "$@"', "sh"]
    drop = [] if capable else ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"]
    command = [*limited, *drop, sys.executable, "-c", CHECK_LIMITS, str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if capable or Path("/run/systemd/system").is_dir():
        assert said.startswith("ok 65536 open files")
    else:
        assert said.startswith("fail training needs 65536 open files but gets only 20000")


# -- what was left behind


def test_processes_of_an_earlier_start_are_named(tmp_path: Path) -> None:
    settings = made(tmp_path, run_id=f"r{os.getpid()}")
    assert "no process" in level(before_a_start.leftovers(settings))["ok"]
    environ = {**os.environ, "PODWATCH_START_ID": "s1", "PODWATCH_RUN": settings.run_id}
    with subprocess.Popen(["sleep", "50"], env=environ) as process:
        try:
            deadline = time.monotonic() + 60
            while "fail" not in (found := level(before_a_start.leftovers(settings))) and time.monotonic() < deadline:
                time.sleep(0.02)  # between fork and exec it has our environment
            assert f"{process.pid} sleep" in found["fail"]
        finally:
            process.kill()


def test_a_pause_shows(tmp_path: Path) -> None:
    settings = made(tmp_path)
    assert not list(before_a_start.paused(settings))
    (tmp_path / "state/r").mkdir(parents=True)
    file = RunFile(tmp_path / "state/r", workspace_of(settings), "r", SystemClock())
    file.edit_now(lambda run: replace(run, pause=Pause(time.time(), None, "root", "new driver")))
    file.close()
    assert "new driver" in level(before_a_start.paused(settings))["warn"]


# -- the store


def of_store(root: Path, url: str) -> dict[str, str]:
    """What is said of the store, also where it ends in an error."""
    lines: list[Line] = []
    try:
        lines += store(made(root, sync={"store": url}))
    except PodwatchError as error:
        lines.append(failed("store", error))
    return level(iter(lines), "store")


def test_a_store_is_tried_out_and_says_which_wrong_hash_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)
    assert "NOT BACKED UP" in of_store(tmp_path, "")["warn"]
    assert "no credentials" in of_store(tmp_path, f"b2://{BUCKET}")["fail"]
    monkeypatch.setenv("B2_APPLICATION_KEY_ID", "half-of-it")
    assert "half of the store's key" in of_store(tmp_path, f"b2://{BUCKET}")["fail"]
    with B2Server(tmp_path / "b2") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        found = of_store(tmp_path, f"b2://{BUCKET}/prefix")
        assert "it refuses data with a wrong SHA-1" in found["ok"]
        assert found.keys() == {"ok"}
        assert not server.versions("prefix/"), "nothing is left"
        monkeypatch.setenv("B2_APPLICATION_KEY", "another-key")
        assert "refuses the key" in of_store(tmp_path, f"b2://{BUCKET}")["fail"]


def test_a_directory_as_a_store(tmp_path: Path) -> None:
    assert "is on the filesystem of output_dir" in of_store(tmp_path, f"file://{tmp_path}/store")["fail"]
    absent = of_store(tmp_path, "file:///dev/shm/not-mounted/store")
    assert "does not exist" in absent["fail"]
    assert "mounted" in absent["fail"]


def test_a_clock_that_is_wrong() -> None:
    assert (_clock(3600.0).level, _clock(-3600.0).level) == ("warn", "warn")
    assert "ahead of" in _clock(3600.0).text
    assert "behind" in _clock(-3600.0).text
    assert (_clock(1.0).level, "matches" in _clock(1.0).text) == ("ok", True)


# -- the whole


def test_the_command_as_a_person_runs_it(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    store = shm / f"podwatch-check-{os.getpid()}"
    same = tmp_path.stat().st_dev == shm.stat().st_dev
    config = tmp_path / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[sync]\nstore = "file://{store}"\n'
        f'[trainer]\nlayout = "hf"\noutput_dir = "{tmp_path}/outputs"\ncommand = ["sh", "-c", "train | tee log"]\n'
    )
    config.chmod(0o600)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "podwatch", "check", "-c", str(config), "--json"],
            capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        report = json.loads(done.stdout)
        schema = Path(__file__).parents[2] / "docs/schema/check.schema.json"
        jsonschema.validate(report, json.loads(schema.read_text()))
        assert done.stderr == ""
        by_name: dict[str, list[str]] = {}
        for check in report["checks"]:
            by_name.setdefault(check["name"], []).append(check["level"])
            assert check["level"] in ("ok", "warn", "fail")
        assert {"layout", "resume", "command", "supervise", "leftovers", "signals", "disk"} <= set(by_name)
        assert "warn" in by_name["command"], "the pipe"
        assert same or "ok" in by_name["store"]
        assert (done.returncode == 1) is any("fail" in levels for levels in by_name.values())
    finally:
        subprocess.run(["rm", "-rf", str(store)], check=True)
