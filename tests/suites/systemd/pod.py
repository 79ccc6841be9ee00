"""A pod inside the machine: the fake trainer, the NVML stand-in, and podwatch installed as a person would do it."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.suites.systemd.machine import Machine
from tests.support import own_times
from tests.support.nvml import build_nvml

REPO = Path(__file__).parents[3]
PODWATCH = str(Path(sys.prefix, "bin", "podwatch"))
ROOT = "/srv/pod"
OUTPUT = f"{ROOT}/work/outputs"
RUN = "night-1"
TIMES = "/etc/podwatch/test-times.toml"
TRAIN_UNIT = f"podwatch-train-{RUN}.service"
SECRET = "K00-not-for-training-4711"
ENV_SECRET = "wandb-secret-for-training-4712"

CONFIG, QUICK = own_times.split(f"""\
run_id = "{RUN}"

[trainer]
layout = "prime-rl"
output_dir = "{OUTPUT}"
cwd = "{ROOT}/work"
command = {json.dumps([sys.executable, "-S", str(REPO / "tests/support/fake_trainer.py"),
                       "--output-dir", OUTPUT, "--control", f"{ROOT}/control", "--ckpt.interval", "10"])}
env = {{ GREETING = "hello from the configuration" }}
env_file = "/root/train.env"
stop_grace = "2s"
save_grace = "2s"

[gpu]
inference = [0]
trainer = [1]
poll = "0.2s"
hold = "1s"

[checkpoints]
rescan = "0.5s"
settle = "0.3s"

[recovery]
backoff_min = "0.1s"
backoff_max = "1s"

[[hooks]]
name = "who"
on = ["checkpoint"]
command = ["sh", "-c", "id -u >> {ROOT}/work/hooks/uids"]
user = "nobody"
""")  # fmt: skip


class Pod:
    """``machine`` is booted; ``prepare`` first, then ``podwatch("install")``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.run = machine.run
        self.before_boot_id = ""
        """What ``install`` said while systemd-nspawn still hid the boot id."""

    def prepare(self) -> None:
        machine = self.machine
        self.run("mkdir", "-p", f"{ROOT}/work", f"{ROOT}/control", f"{ROOT}/store")
        self.run("mkdir", "-m", "1777", f"{ROOT}/work/hooks")
        build_nvml(machine.root / "srv/pod/lib")
        machine.write("/etc/podwatch/podwatch.toml", CONFIG, 0o600)
        machine.write(TIMES, QUICK, 0o600)
        secrets = f"B2_APPLICATION_KEY_ID=0001\nB2_APPLICATION_KEY={SECRET}\n"
        machine.write("/etc/podwatch/podwatch.env", secrets, 0o600)
        machine.write("/root/train.env", f"WANDB_API_KEY={ENV_SECRET}\n", 0o600)
        test = "[Service]\nWatchdogSec=5s\nRestartSec=0.2s\n"
        test += f"Environment=NVML_STANDIN={ROOT}/world LD_LIBRARY_PATH={ROOT}/lib {own_times.VARIABLE}={TIMES}\n"
        machine.write("/etc/systemd/system/podwatch.service.d/50-test.conf", test)
        cards = str(REPO / "tests/suites/systemd/cards.py")
        self.run("systemd-run", "--quiet", "--unit=cards", sys.executable, cards, f"{ROOT}/world", f"{ROOT}/control")

    def podwatch(self, *arguments: str, check: bool = True) -> str:
        return self.run(PODWATCH, *arguments, check=check)

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.podwatch("status", "--json", check=False))
        return document

    def show(self, unit: str, name: str) -> str:
        return self.run("systemctl", "show", unit, "--property", name, "--value").strip()

    @property
    def main_pid(self) -> int:
        return int(self.show("podwatch", "MainPID"))

    def trainer(self) -> int:
        """The trainer's pid inside the machine; 0 while none lives."""
        return self._living("trainer")

    def engine(self) -> int:
        return self._living("engine")

    def _living(self, what: str) -> int:
        pid = self.run("cat", f"{ROOT}/control/{what}.pid", check=False).strip()
        state = self.run("ps", "-o", "state=", "-p", pid, check=False).strip() if pid.isdigit() else ""
        return int(pid) if state and state[0] not in "ZX" else 0

    def wait(self, condition: Any, seconds: float, what: str) -> None:
        try:
            self.machine.wait(condition, seconds, what)
        except AssertionError as error:
            journal = self.run("journalctl", "-u", "podwatch", "-n", "40", "--no-pager", check=False)
            raise AssertionError(f"{error}\n{journal}") from None

    def wait_running(self) -> int:
        """Until the service is active, training runs and has made a step; the trainer's pid."""
        self.wait(lambda: self.show("podwatch", "ActiveState") == "active", 60, "podwatch is active")
        self.wait(self.trainer, 30, "training runs")
        self.wait(lambda: self.status().get("training", {}).get("state") == "running", 30, "training is known to run")
        return self.trainer()

    def journal(self, *match: str, unit: str = "podwatch") -> list[dict[str, Any]]:
        """Entries of the unit, oldest first, as journald stored them."""
        self.run("journalctl", "--sync")  # what was said just now may not be stored yet
        text = self.run("journalctl", "-u", unit, "-o", "json", "--no-pager", *match)
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.journal(f"PODWATCH_EVENT={name}")
