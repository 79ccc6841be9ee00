"""docs/contributing.md: its paths and names exist, and its examples do what they are examples of."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from podwatch.checkpoints.trainer import trainer_from
from podwatch.config.settings import Policies
from podwatch.detection import rules
from podwatch.detection.rules import Rule
from podwatch.domain.finding import FindingKind
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import HostSample, SensorState, Snapshot, observed
from podwatch.report.deliver_notices import NotSent
from podwatch.sensors.log_tail import StepLine, StepLines, clean
from podwatch.system.clock import SystemClock
from podwatch.trainer.process_roles import Roles
from tests.cli.conftest import ROOT, Machine
from tests.sensors.waiting import until
from tests.support.package import PAGE, examples

TEXT = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.M | re.S)


def file_of(name: str) -> Path:
    return next((p for p in (ROOT / name, ROOT / "src/podwatch" / name) if p.exists()), ROOT / name)


def test_every_path_exists() -> None:
    named = set(re.findall(r"`([\w./-]+/(?:[\w.-]+\.py)?)`", TEXT))
    assert len(named) > 30
    assert [name for name in named if not file_of(name).exists()] == []
    links = set(re.findall(r"\(([\w/-]+\.md)[#)]", TEXT))
    assert [name for name in links if not (PAGE.parent / name).exists()] == []


def test_every_name_is_in_the_file_that_is_said_to_hold_it() -> None:
    flat = " ".join(TEXT.split())
    pairs = re.findall(r"`(\w+)`,? (?:of|in) `([\w/]+\.py)`", flat) + re.findall(r"`(\w+)` \(`([\w/]+\.py)`", flat)
    assert len(pairs) > 15
    for name, file in pairs:
        assert re.search(rf"\b{name}\b", file_of(file).read_text()), (name, file)
    for name in ("parse_url", "open_objects"):
        assert f"def {name}(" in file_of("store/objects/open.py").read_text()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str) -> ModuleType:
        (tmp_path / f"{name}.py").write_text(examples()[f"{name}.py"])
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def test_the_layout(example: Any) -> None:
    """Its files and its resume: tests/cli/test_added_by_a_package.py."""
    kind = trainer_from("shelf", example("podwatch_shelf").LAYOUT)
    found = StepLines((kind.log,)).parse(clean(b"shelf step 7: loss 0.5"))
    assert found == StepLine(7)
    assert Roles((kind.processes,)).classify("shelf", "shelf --resume x") is ProcessRole.TRAINER


def test_the_detector_is_one_function_and_one_line(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example("crowded")
    assert [name for name, value in vars(module).items() if getattr(value, "__module__", "") == "crowded"] == [
        "crowded"
    ]
    line = Rule("crowded", module.crowded, (FindingKind.SHM_LOW,))
    monkeypatch.setattr(rules, "RULES", (*(rule for rule in rules.RULES if rule.name == "hang"), line))
    state, found = rules.initial(Policies()), []
    for at in (0.0, 30.0, 60.0, 90.0):
        host = observed(HostSample(100, 50, shm_total_bytes=10, shm_used_bytes=10 if at < 90 else 9), at)
        state, findings = rules.advance(state, Snapshot(at, at, host=host), Policies())
        found.append([f.key for f in findings])
    assert found == [[], [], ["shm-low"], []]


async def test_the_sensor(example: Any) -> None:
    sensor = example("load").LoadSensor(SystemClock(), poll=0.1)
    await sensor.start()
    await until(lambda: sensor.latest().state is not SensorState.PENDING)
    reading = sensor.latest()
    await sensor.stop()
    assert reading.value.running >= 0.0, reading


async def test_the_notifier(example: Any, tmp_path: Path) -> None:
    module = example("syslog_channel")
    program = tmp_path / "logger"
    program.write_text(f'#!/bin/sh\nprintf "%s" "$*" > {tmp_path}/said\n')
    program.chmod(0o755)
    await module.SyslogChannel(20.0, str(program)).send({"title": "r: disk full"})
    assert (tmp_path / "said").read_text() == "-t podwatch r: disk full"
    with pytest.raises(NotSent) as refused:
        await module.SyslogChannel(20.0, str(tmp_path / "none")).send({"title": "x"})
    assert refused.value.final


def test_the_command(guarded: Machine, tmp_path: Path) -> None:
    (tmp_path / "phase.py").write_text(examples()["phase.py"])
    code = "from podwatch.cli import root\nroot.COMMANDS['phase'] = 'phase'\nroot.cli()"
    env = {**guarded.env, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    said = {
        arguments: subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=150
        ).stdout
        for arguments in (("--help",), ("phase",), ("phase", "--json"))
    }
    assert "Show what training is doing." in said["--help",]
    assert said["phase",].strip() == "running"
    assert '"state": "running"' in said["phase", "--json"]
