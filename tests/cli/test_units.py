"""The shipped units as texts: both say the same, and what they promise stays in them.

Their life under a real systemd is the business of tests/suites/systemd.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).parents[2] / "systemd"
NAMES = ("podwatch.service", "podwatch@.service")
EXPOSURE = 3.4


def values(name: str, key: str) -> list[str]:
    lines = (UNITS / name).read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def test_both_units_differ_in_the_names_of_the_run_only() -> None:
    def general(name: str) -> list[str]:
        own = ("Description=", "ExecStart=", "EnvironmentFile=")
        return [line for line in (UNITS / name).read_text().splitlines() if not line.startswith(own)]

    assert general("podwatch.service") == general("podwatch@.service")


@pytest.mark.parametrize("name", NAMES)
def test_the_unit_never_gives_up_except_where_a_restart_cannot_help(name: str) -> None:
    assert values(name, "StartLimitIntervalSec") == ["0"]
    assert not values(name, "StartLimitBurst")
    assert values(name, "Restart") == ["on-failure"]
    assert set(values(name, "RestartPreventExitStatus")[0].split()) == {"64", "65", "77", "78", "86"}


@pytest.mark.parametrize("name", NAMES)
def test_the_gpus_stay_within_reach(name: str) -> None:
    assert not values(name, "PrivateDevices")
    assert values(name, "DeviceAllow") == ["char-nvidia* rw", "char-nvidiactl rw", "char-nvidia-uvm rw"]


@pytest.mark.parametrize("name", NAMES)
def test_exposure_does_not_grow(name: str, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / name.replace("@", "@night")
    unit.write_text((UNITS / name).read_text())
    done = subprocess.run([tool, "security", "--offline=true", "--no-pager", unit], capture_output=True, text=True)
    if "offline" in done.stderr:
        pytest.skip("needs systemd-analyze 250 or newer")
    found = re.search(r"Overall exposure level for \S+ ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) <= EXPOSURE, done.stdout
