"""podwatch's systemd service on this machine: the names of its files, which of them podwatch wrote, and systemctl.

A file that `podwatch install` writes says so in its first line. So an upgrade replaces what podwatch wrote, and nothing
that an operator wrote: no record of the installation is needed, and none can be lost.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from podwatch.domain.errors import HostError, PermissionDenied, UsageError

ETC = Path("/etc/podwatch")
UNITS = Path("/etc/systemd/system")
BOOTED = Path("/run/systemd/system")
"""Exists if and only if systemd is the running init (sd_booted(3))."""

BOOT_ID = "/proc/sys/kernel/random/boot_id"
SIGNATURE = "# Written by `podwatch install`, which replaces it: without this line podwatch leaves the file alone.\n"
_FACT = re.compile(r"^# (Run|Configuration): (.*)$", re.M)


@dataclass(frozen=True, slots=True)
class Service:
    """The service of one run. ``name`` is empty, or that of an instance (podwatch@NAME)."""

    name: str = ""

    @property
    def unit(self) -> str:
        return f"podwatch@{self.name}" if self.name else "podwatch"

    @property
    def shipped(self) -> str:
        """The file name of the unit; all instances share one."""
        return "podwatch@.service" if self.name else "podwatch.service"

    @property
    def unit_file(self) -> Path:
        return UNITS / self.shipped

    @property
    def dropin(self) -> Path:
        return UNITS / f"{self.unit}.service.d" / "10-paths.conf"

    @property
    def configuration(self) -> Path:
        """Where the service looks for its configuration if the drop-in names none."""
        return ETC / f"{self.name or 'podwatch'}.toml"

    @property
    def key_file(self) -> Path:
        """The unit's EnvironmentFile."""
        return ETC / f"{self.name or 'podwatch'}.env"

    def installed_for(self) -> tuple[str, str]:
        """The run and the configuration file that the drop-in was written for; empty where it does not say."""
        try:
            facts = dict(_FACT.findall(self.dropin.read_text()))
        except (OSError, ValueError):
            return "", ""
        return facts.get("Run", ""), facts.get("Configuration", "")


def service_of(name: str) -> Service:
    """UsageError for a name that is no name of a run."""
    from podwatch.domain.safe_names import valid_run_id

    if name and not valid_run_id(name):
        raise UsageError("not a valid service name", where=f"--run {name}", fix="use letters, digits, . _ -")
    return Service(name)


def variables_of(file: Path) -> dict[str, str]:
    """The variables of the service's environment file; none where there is no file, or only root can read it."""
    from podwatch.config.env_files import read_env_file

    return read_env_file(file) if os.access(file, os.R_OK) else {}


# -- who wrote a file ------------------------------------------------------------------------------------------------


class Origin(StrEnum):
    ABSENT = "absent"
    OURS = "ours"
    """It begins with SIGNATURE."""
    FOREIGN = "foreign"
    """podwatch did not write it: another text, a link, another owner."""


def origin(path: Path) -> Origin:
    """Who wrote a file of the service. Raises OSError where it cannot be read."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return Origin.ABSENT
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        return Origin.FOREIGN
    return Origin.OURS if path.read_bytes().startswith(SIGNATURE.encode()) else Origin.FOREIGN


# -- systemd ---------------------------------------------------------------------------------------------------------


def require_systemd(command: list[str]) -> None:
    """Raises HostError without a usable systemd, PermissionDenied for a user other than root, whose error names the
    ``command`` to run."""
    if not BOOTED.is_dir() or shutil.which("systemctl") is None:
        raise HostError(
            "systemd does not run here (a container?)",
            where=str(BOOTED),
            fix="`podwatch run --detach` in the pod's start command, or podwatch as process 1 (docs/pods.md)",
        )
    if os.geteuid() != 0:
        raise PermissionDenied(
            "Permission denied: only root can install a service",
            where=str(UNITS),
            fix=f"sudo {' '.join(command)}; without root: `podwatch run --detach`",
        )
    if any(line.split()[4] == BOOT_ID for line in Path("/proc/self/mountinfo").read_text().splitlines()):
        # systemd-nspawn mounts over it. A sandboxed service has its own /proc with the real boot id, so podwatch and
        # its supervisor would compare different boot ids.
        raise HostError(
            "a mount in this container hides the boot id, but not from sandboxed services: podwatch and its supervisor"
            " would read different boot ids",
            where=BOOT_ID,
            fix=f"umount {BOOT_ID} at each boot of the container, or use `podwatch run --detach`",
        )


def systemctl(*arguments: str) -> None:
    """Raises HostError with systemctl's own message."""
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError(f"systemctl {arguments[0]} failed: {done.stderr.strip()}", fix="read `journalctl -xe`")


def show(unit: str, name: str) -> str:
    """A property of a unit; empty without systemd."""
    if not BOOTED.is_dir():
        return ""
    command = ["systemctl", "show", unit, "--property", name, "--value"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def active(unit: str) -> bool:
    """Whether the service runs, or systemd is about to start it again."""
    return show(unit, "ActiveState") in ("active", "activating", "reloading")


def start(unit: str, verb: str) -> None:
    """``verb`` is start or restart; returns when the service is ready. HostError with the last lines of its log."""
    done = subprocess.run(["systemctl", verb, unit], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    log = ["journalctl", "-u", unit, "-n", "8", "-o", "cat", "--no-pager"]
    said = subprocess.run(log, capture_output=True, text=True, check=False).stdout
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith(("Started ", "Starting "))]
    raise HostError(
        f"systemd could not {verb} the service: {' | '.join(lines[-3:]) or done.stderr.strip()}",
        where=unit,
        fix=f"correct that, then `systemctl {verb} {unit}`; `journalctl -u {unit}` has the whole log",
    )


# -- what else guards the run ----------------------------------------------------------------------------------------


def guard_elsewhere(run_id: str, state_dir: Path, unit: str) -> int:
    """The pid that ends a podwatch that guards the run and is not this service's; 0 if there is none. With `--detach`
    it is that of the parent, which would start the daemon again."""
    from podwatch.cli.find_daemon import Hints, find_runs
    from podwatch.system.endpoint import process_alive

    runs = find_runs(os.environ, Hints(run_id, state_dir))
    found = next((one for one in runs if one.alive and one.endpoint.run_id == run_id), None)
    if found is None or str(found.endpoint.pid) == show(unit, "MainPID"):
        return 0
    with contextlib.suppress(OSError, ValueError):
        parent = int((found.directory / "init.pid").read_text())
        if process_alive(parent, 0):
            return parent
    return found.endpoint.pid


def ends_training(pid: int) -> bool:
    """Whether a SIGTERM to this podwatch, of ``guard_elsewhere``, also ends training: it is PID 1 of a container, or
    an engine's job (trainer/supervise.py). False if it cannot be read."""
    if pid == 1:
        return True
    try:
        return b"--job" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def running_version(run_id: str, state_dir: Path) -> str:
    """The version of the podwatch that guards the run; empty if none does, or it does not say."""
    from podwatch.cli.find_daemon import Hints, find_runs

    runs = find_runs({}, Hints(run_id, state_dir))
    return next((f.endpoint.version for f in runs if f.alive and f.endpoint.run_id == run_id), "")
