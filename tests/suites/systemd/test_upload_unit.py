"""The upload child under a real systemd: in a scope of its own, with its pipes and the sandbox of the service.

Whether the weights count depends on the controllers that the machine gives its services: this container's are
read-only, so that only their being set is looked at."""

import sys
from collections.abc import Iterator

import pytest

from podwatch.sync.upload.start_child import CPU_WEIGHT, IO_WEIGHT
from tests.suites.systemd.machine import MISSING, REPO, Machine, booted

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

SCRIPT = f'''
import asyncio, os, subprocess, sys
sys.path.insert(0, {str(REPO / "src")!r})
from podwatch.sync.upload.start_child import OwnUnit, unit_of
LOOK = """
import os, sys
print(open("/proc/self/cgroup").read().split("name=systemd:")[-1].splitlines()[0].rpartition("/")[2], flush=True)
print(os.getppid(), [l.split()[1] for l in open("/proc/self/status") if l.startswith("NoNewPrivs")][0], flush=True)
print(sys.stdin.readline().strip(), flush=True)
"""
own = OwnUnit()
prefix = asyncio.run(own.prefix())
print("prefix", bool(prefix))
child = subprocess.Popen([*prefix, sys.executable, "-c", LOOK], stdin=-1, stdout=-1, text=True)
unit = child.stdout.readline().strip()
print(unit)
print(child.stdout.readline().strip() == f"{{os.getpid()}} 1")
shown = subprocess.run(["systemctl", "show", unit, "-p", "CPUWeight", "-p", "IOWeight"], capture_output=True, text=True)
print(sorted(shown.stdout.split()))
print(unit == unit_of(prefix) and asyncio.run(own.reweigh(unit, 100)))
shown = subprocess.run(["systemctl", "show", unit, "-p", "CPUWeight", "-p", "IOWeight"], capture_output=True, text=True)
print(sorted(shown.stdout.split()))
print(child.communicate("through the pipe")[0].strip(), child.returncode)
'''


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with booted() as running:
        running.write("/root/upload.py", SCRIPT)
        yield running


def _service(machine: Machine, *properties: str) -> list[str]:
    options = ["--wait", "--pipe", "--quiet", *(f"--property={p}" for p in properties)]
    return machine.run("systemd-run", *options, sys.executable, "/root/upload.py").splitlines()


def test_a_sandboxed_service_gets_it(machine: Machine) -> None:
    said = _service(
        machine, "NoNewPrivileges=yes", "ProtectSystem=strict", "ProtectControlGroups=yes", "RestrictNamespaces=yes",
        "SystemCallFilter=@system-service", "CapabilityBoundingSet=CAP_KILL CAP_DAC_OVERRIDE CAP_FOWNER CAP_CHOWN",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    )  # fmt: skip
    assert said[0] == "prefix True"
    assert said[1].startswith("podwatch-upload-")
    assert said[1].endswith(".scope")
    assert said[2] == "True", "its parent is not the service, or the sandbox is gone"
    assert said[3] == str([f"CPUWeight={CPU_WEIGHT}", f"IOWeight={IO_WEIGHT}"])
    assert said[4] == "True", "the weights of the running child cannot be changed"
    assert said[5] == str(["CPUWeight=100", "IOWeight=100"])
    assert said[6] == "through the pipe 0"
    assert "0 loaded units" in machine.run("systemctl", "list-units", "podwatch-upload*", "--all")


def test_a_service_that_may_not_ask_systemd_goes_without(machine: Machine) -> None:
    said = _service(machine, "InaccessiblePaths=/run/systemd/private /run/dbus")
    assert said[0] == "prefix False"
    assert not said[1].startswith("podwatch-upload-")
