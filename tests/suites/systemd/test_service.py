"""podwatch as a service of a real systemd, installed by its own command. The tests follow one night in order; each one
leaves training running."""

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch import __version__
from podwatch.journal import Journal
from tests.suites.systemd.machine import MISSING, booted
from tests.suites.systemd.pod import CONFIG, ENV_SECRET, OUTPUT, PODWATCH, REPO, ROOT, RUN, SECRET, TRAIN_UNIT, Pod
from tests.support.nvml import NoCompiler

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def pod() -> Iterator[Pod]:
    with booted() as machine:
        made = Pod(machine)
        try:
            made.prepare()
            made.before_boot_id = made.podwatch("install", check=False)
            machine.show_boot_id()
        except NoCompiler as missing:
            pytest.skip(str(missing))
        yield made


def status_text(pod: Pod) -> str:
    return pod.show("podwatch", "StatusText")


def _security(pod: Pod, pid: int) -> dict[str, str]:
    fields = dict(line.split(":", 1) for line in pod.run("cat", f"/proc/{pid}/status").splitlines())
    return {name: fields[name].strip() for name in ("NoNewPrivs", "CapBnd", "Seccomp", "Seccomp_filters")}


# -- installing


def test_a_hidden_boot_id_is_refused(pod: Pod) -> None:
    assert "hides the boot id" in pod.before_boot_id
    assert "wrote" not in pod.before_boot_id


def test_install_shows_then_writes_then_changes_nothing(pod: Pod) -> None:
    shown = pod.podwatch("install", "--dry-run")
    assert "would write /etc/systemd/system/podwatch.service" in shown
    assert "would enable and start podwatch" in shown
    assert "No such file" in pod.run("cat", "/etc/systemd/system/podwatch.service", check=False)
    first = pod.podwatch("install", "--no-start")
    assert "wrote     /etc/systemd/system/podwatch.service.d/10-paths.conf" in first
    assert "not started: systemctl start podwatch" in first
    assert pod.show("podwatch", "UnitFileState") == "enabled"
    assert pod.show("podwatch", "ActiveState") == "inactive"
    again = pod.podwatch("install", "--no-start")
    assert "wrote" not in again
    assert again.count("unchanged") == 2
    dropin = pod.run("cat", "/etc/systemd/system/podwatch.service.d/10-paths.conf")
    assert f"ReadWritePaths={ROOT}/work\n" in dropin
    verified = pod.run("systemd-analyze", "verify", "podwatch.service", check=False)
    assert "podwatch.service" not in verified, verified
    assert PODWATCH in pod.show("podwatch", "ExecStart")


def test_a_unit_that_is_no_longer_podwatchs_is_not_overwritten(pod: Pod) -> None:
    """Who changes it removes the first line, as that line says."""
    unit = "/etc/systemd/system/podwatch.service"
    pod.run("sed", "-i", "-e", "1d", "-e", "s/^WatchdogSec=.*/WatchdogSec=61s/", unit)
    refused = pod.podwatch("install", check=False)
    assert f"{unit} was not written by podwatch" in refused
    assert "50-local.conf" in refused
    assert "WatchdogSec=61s" in pod.run("cat", unit)
    assert f"{unit}, which podwatch did not write" in pod.podwatch("install", "--dry-run")
    pod.run("mv", unit, f"{unit}.old")
    assert f"wrote     {unit}" in pod.podwatch("install", "--no-start")
    assert "WatchdogSec=60s" in pod.run("cat", unit)


def test_without_root_it_is_refused_with_77(pod: Pod) -> None:
    # Everything is imported before the privileges go: the interpreter may lie where nobody else can read.
    program = (
        "import os, sys, podwatch.cli.root, podwatch.cli.install, podwatch.config.command_directory;"
        "os.setuid(65534); sys.argv[1:] = ['install']; podwatch.cli.main()"
    )
    python = str(Path(PODWATCH).with_name("python"))
    said = pod.run("sh", "-c", 'cd /; "$0" -c "$1"; echo code=$?', python, program)
    assert "only root can install a service" in said
    assert "code=77" in said


# -- running


def test_start_is_ready_and_status_says_what_it_does(pod: Pod) -> None:
    assert "started podwatch: podwatch 0." in pod.podwatch("install")  # returns at READY=1
    assert pod.show("podwatch", "ActiveState") == "active"
    pod.wait_running()
    assert "is running with these files: nothing to do" in pod.podwatch("install")
    pod.wait(lambda: re.search(r"step \d+", status_text(pod)), 20, "a status text with a step")
    assert "Status: " in pod.run("systemctl", "status", "podwatch", "--no-pager", check=False)
    status = pod.status()
    assert status["running"], status
    assert status["run_id"] == RUN
    assert {r["kind"] for r in status["reasons"]} == {"not-backed-up"}, status["reasons"]


def test_training_is_outside_and_gets_its_own_surroundings(pod: Pod) -> None:
    trainer = pod.wait_running()
    for pid in (trainer, pod.engine()):
        assert TRAIN_UNIT in pod.run("cat", f"/proc/{pid}/cgroup")
        assert "podwatch.service" not in pod.run("cat", f"/proc/{pid}/cgroup")
    assert pod.run("readlink", f"/proc/{trainer}/cwd").strip() == f"{ROOT}/work"
    limits = pod.run("cat", f"/proc/{trainer}/limits")
    can = pod.run("sh", "-c", "ulimit -n 65536 2>/dev/null || ulimit -n $(ulimit -Hn); ulimit -n").strip()
    assert re.search(rf"Max open files\s+{can}\s", limits), limits
    assert pod.run("cat", f"/proc/{trainer}/oom_score_adj").strip() == "0"
    # Some hosts do not let even their root lower it; systemd then goes on without.
    lowest = pod.run(
        "sh", "-c", "echo -500 2>/dev/null >/proc/self/oom_score_adj; cat /proc/self/oom_score_adj"
    ).strip()
    assert pod.run("cat", f"/proc/{pod.main_pid}/oom_score_adj").strip() == lowest
    assert pod.show("podwatch", "OOMScoreAdjust") == "-500"
    trained, machine, guard = (_security(pod, pid) for pid in (trainer, 1, pod.main_pid))
    assert trained == machine, "the trainer is as free as the machine itself"
    assert (guard["NoNewPrivs"], guard["CapBnd"]) == ("1", "00000000000800eb")
    assert int(guard["Seccomp_filters"]) > int(trained["Seccomp_filters"])
    environ = dict(
        line.split("=", 1) for line in pod.run("cat", f"/proc/{trainer}/environ").split("\0") if "=" in line
    )  # fmt: skip
    assert environ["GREETING"] == "hello from the configuration"
    assert environ["WANDB_API_KEY"] == ENV_SECRET
    assert environ["HOME"] == "/root"
    for name in environ:
        assert not name.startswith(("B2_", "WATCHDOG_", "LISTEN_")), name
        assert name not in ("NOTIFY_SOCKET", "INVOCATION_ID", "JOURNAL_STREAM", "CREDENTIALS_DIRECTORY"), name
    ours = {n for n in environ if n.startswith("PODWATCH_") and not n.startswith("PODWATCH_HEARTBEAT_")}
    assert ours <= {"PODWATCH_START_ID", "PODWATCH_RUN", "PODWATCH_STEP", "PODWATCH_CHECKPOINT", "PODWATCH_RESUME_ARGS"}
    assert SECRET not in environ.values()
    commands = pod.run("ps", "-eo", "args")
    assert SECRET not in commands
    assert ENV_SECRET not in commands
    assert SECRET not in pod.run("systemctl", "show", TRAIN_UNIT)


def test_the_journal_has_fields(pod: Pod) -> None:
    started = pod.events("trainer-started")[-1]
    assert (started["PRIORITY"], started["SYSLOG_IDENTIFIER"]) == ("6", "podwatch")
    pod.wait(lambda: pod.events("checkpoint-complete"), 20, "a checkpoint")
    complete = pod.events("checkpoint-complete")[-1]
    assert int(complete["STEP"]) % 10 == 0
    warning = [e for e in pod.journal("PRIORITY=4") if "NOT BACKED UP" in e["MESSAGE"]]
    assert warning
    everything = pod.run("journalctl", "-o", "json", "--no-pager")
    assert SECRET not in everything
    assert ENV_SECRET not in everything


# -- the sandbox


def test_files_elsewhere_cannot_be_written(pod: Pod) -> None:
    inside = ("nsenter", "-t", str(pod.main_pid), "-m")
    for path in ("/etc/x", "/usr/x", "/root/x", f"{ROOT}/control/x", "/var/x"):
        assert "Read-only file system" in pod.run(*inside, "touch", path, check=False), path
    for path in (f"{ROOT}/work/x", f"{OUTPUT}/x", "/var/lib/podwatch/x", "/run/podwatch/x"):
        assert pod.run(*inside, "touch", path) == ""
        pod.run(*inside, "rm", path)
    # Two mounts would make this EXDEV: the parent has to be named, not its children.
    pod.run(*inside, "mkdir", f"{OUTPUT}/set-aside")
    pod.run(*inside, "python3", "-c", f"import os; os.rename('{OUTPUT}/set-aside', '{ROOT}/work/set-aside')")
    pod.run("rmdir", f"{ROOT}/work/set-aside")


def test_exposure(pod: Pod) -> None:
    report = pod.run("systemd-analyze", "security", "podwatch", "--no-pager", check=False)
    found = re.search(r"Overall exposure level for podwatch.service: ([\d.]+)", report)
    assert found, report
    print(f"\nsystemd-analyze security podwatch: exposure {found[1]}")
    assert float(found[1]) <= 3.4, report


def test_a_command_of_the_operator_runs_as_another_user_under_the_sandbox(pod: Pod) -> None:
    uids = f"{ROOT}/work/hooks/uids"
    pod.wait(lambda: pod.run("sh", "-c", f"cat {uids} 2>&-", check=False).split(), 60, "the hook of a checkpoint ran")
    assert set(pod.run("cat", uids).split()) == {pod.run("id", "-u", "nobody").strip()}


# -- leaving, dying, hanging


def test_stop_leaves_training_and_start_adopts_it(pod: Pod) -> None:
    trainer = pod.wait_running()
    pod.run("systemctl", "stop", "podwatch")
    assert pod.show("podwatch", "Result") == "success"
    assert pod.trainer() == trainer
    assert "training continues UNGUARDED" in pod.events("daemon-stopping")[-1]["MESSAGE"]
    pod.run("systemctl", "start", "podwatch")
    assert pod.wait_running() == trainer
    assert pod.events("trainer-adopted")[-1]["PID"] == str(trainer)


def test_anyone_may_ask_for_the_status_and_only_root_may_control(pod: Pod) -> None:
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    pod.wait(
        lambda: pod.run("ls", f"/run/podwatch/{RUN}/status.json", check=False).startswith("/run"), 30, "status.json"
    )
    for name in ("endpoint.json", "status.json"):
        document = json.loads(pod.run(*nobody, "cat", f"/run/podwatch/{RUN}/{name}"))
        assert document["run_id"] == RUN
    assert "ermission denied" in pod.run(*nobody, "ls", f"/run/podwatch/{RUN}/control", check=False)


def test_a_killed_daemon_is_started_again_and_adopts(pod: Pod) -> None:
    trainer, daemon = pod.wait_running(), pod.main_pid
    pod.run("kill", "-9", str(daemon))
    pod.wait(lambda: pod.main_pid not in (0, daemon), 30, "systemd restarts podwatch")
    assert pod.wait_running() == trainer
    assert int(pod.show("podwatch", "NRestarts")) == 1


def test_a_hung_daemon_is_restarted_by_the_watchdog(pod: Pod) -> None:
    trainer, daemon = pod.wait_running(), pod.main_pid
    pod.run("kill", "-STOP", str(daemon))
    pod.wait(lambda: pod.main_pid not in (0, daemon), 40, "the watchdog ends the hung podwatch")
    assert pod.wait_running() == trainer
    assert "Watchdog timeout" in pod.run("journalctl", "-u", "podwatch", "--no-pager")


def test_a_sick_pod_is_never_given_up(pod: Pod) -> None:
    """More deaths than systemd's default limit (5 in 10 s) and than the unit of 772aae4 allowed (20 in 10 min)."""
    trainer, before = pod.wait_running(), int(pod.show("podwatch", "NRestarts"))
    for _ in range(24):
        daemon = pod.main_pid
        pod.run("kill", "-9", str(daemon))
        pod.wait(lambda: pod.main_pid not in (0, daemon), 30, "systemd restarts podwatch")  # noqa: B023
    assert pod.wait_running() == trainer
    assert int(pod.show("podwatch", "NRestarts")) == before + 24
    assert pod.show("podwatch", "Result") == "success"


@pytest.mark.parametrize("code", [64, 65, 77, 78, 86, 1, 69, 75])
def test_which_exits_are_final(pod: Pod, code: int) -> None:
    """The shipped unit with a command that ends like this."""
    name = f"podwatch@code{code}"
    final = code in (64, 65, 77, 78, 86)
    dropin = f"[Service]\nExecStart=\nExecStart=/bin/sh -c 'exit {code}'\nRestartSec=0.1s\n"
    pod.machine.write(f"/etc/systemd/system/{name}.service.d/50-test.conf", dropin)
    unit = (REPO / "systemd/podwatch@.service").read_text()
    pod.machine.write("/etc/systemd/system/podwatch@.service", unit)
    pod.run("systemctl", "daemon-reload")
    pod.run("systemctl", "start", "--no-block", name)
    if final:
        pod.wait(lambda: pod.show(name, "ActiveState") == "failed", 20, "it has failed")
        assert pod.show(name, "ExecMainStatus") == str(code)
        assert pod.show(name, "NRestarts") == "0"
    else:
        pod.wait(lambda: int(pod.show(name, "NRestarts")) > 8, 30, "it is restarted beyond systemd's default limit")
    pod.run("systemctl", "stop", name)
    pod.run("rm", "/etc/systemd/system/podwatch@.service")  # `podwatch install` did not write it
    pod.run("systemctl", "daemon-reload")


def test_reload(pod: Pod) -> None:
    daemon = pod.main_pid
    before = len(pod.events("config-reloaded"))
    pod.machine.write("/etc/podwatch/podwatch.toml", CONFIG.replace('hold = "1s"', 'hold = "1200ms"'), 0o600)
    pod.run("systemctl", "reload", "podwatch")
    pod.wait(lambda: len(pod.events("config-reloaded")) > before, 20, "the reload is told")
    assert pod.events("config-reloaded")[-1]["MESSAGE"].startswith("configuration reloaded")
    pod.machine.write("/etc/podwatch/podwatch.toml", CONFIG.replace("night-1", "another"), 0o600)
    pod.run("systemctl", "reload", "podwatch")
    pod.wait(lambda: pod.events("config-refused"), 20, "a change that is not possible is refused")
    assert "run_id" in pod.events("config-refused")[-1]["MESSAGE"]
    pod.machine.write("/etc/podwatch/podwatch.toml", CONFIG, 0o600)
    pod.run("systemctl", "reload", "podwatch")
    assert pod.main_pid == daemon


# -- the job itself


def test_a_silent_death_is_healed_under_the_sandbox(pod: Pod) -> None:
    trainer = pod.wait_running()
    pod.wait(lambda: "silent-death:gpu0" in pod.status()["daemon"]["armed"], 30, "the detector is armed")
    # One that was seen for a moment only is no engine that can be missed.
    pod.wait(lambda: "engine-process" in pod.status()["daemon"]["second_signals"], 30, "the engine is known")
    pod.run("kill", "-9", str(pod.engine()))
    pod.wait(lambda: pod.events("incident-closed"), 60, "the incident is closed")
    opened, closed = pod.events("incident-opened")[-1], pod.events("incident-closed")[-1]
    # Its memory and its process go within a poll of each other: whichever is seen gone first names the incident.
    assert opened["KIND"] in ("silent-death", "required-child-exited"), opened
    assert int(closed["RESUMED_STEP"]) >= 10
    assert pod.wait_running() != trainer
    assert TRAIN_UNIT in pod.run("cat", f"/proc/{pod.trainer()}/cgroup")
    assert pod.run("sh", "-c", f"ls {ROOT}/control/double 2>/dev/null; true") == ""


def test_stop_training_ends_the_transient_unit_and_start_makes_it_anew(pod: Pod) -> None:
    pod.wait_running()
    pod.podwatch("stop-training")  # answers when the stop is durable and begun
    pod.wait(lambda: not pod.trainer() and not pod.engine(), 20, "training is stopped")
    pod.wait(lambda: pod.show(TRAIN_UNIT, "LoadState") == "not-found", 20, "the transient unit is gone")
    assert pod.show("podwatch", "ActiveState") == "active"
    pod.podwatch("start")
    pod.wait_running()
    assert pod.show(TRAIN_UNIT, "ActiveState") == "active"


# -- more than one, and none at all


def test_a_second_run_is_an_instance_and_a_bad_configuration_is_not_retried(pod: Pod) -> None:
    second = (
        'run_id = "second"\n[trainer]\nlayout = "prime-rl"\noutput_dir = "/srv/second/outputs"\nsupervise = "attach"\n'
    )
    pod.machine.write("/etc/podwatch/second.toml", second, 0o600)
    missing = pod.podwatch("--run", "second", "install", check=False)
    assert "/srv/second" in missing
    assert "mkdir -p" in missing
    pod.run("mkdir", "-p", "/srv/second")
    assert "started podwatch@second" in pod.podwatch("--run", "second", "install")
    assert any("run second" in entry["MESSAGE"] for entry in pod.journal(unit="podwatch@second"))
    assert json.loads(pod.podwatch("--run", "second", "status", "--json", check=False))["running"]
    pod.run("systemctl", "stop", "podwatch@second")

    pod.machine.write("/etc/podwatch/broken.toml", 'run_id = "broken"\nnonsense = 1\n', 0o600)
    pod.run("systemctl", "start", "podwatch@broken", check=False)
    pod.wait(lambda: pod.show("podwatch@broken", "ActiveState") == "failed", 20, "the broken one has failed")
    assert pod.show("podwatch@broken", "ExecMainStatus") == "78"
    assert pod.show("podwatch@broken", "NRestarts") == "0"
    assert "nonsense" in pod.run("journalctl", "-u", "podwatch@broken", "--no-pager")


def test_a_configuration_elsewhere_is_named_in_the_unit(pod: Pod) -> None:
    pod.wait_running()
    pod.machine.write("/srv/pod/my config.toml", CONFIG, 0o600)
    trainer = pod.trainer()
    said = pod.podwatch("-c", "/srv/pod/my config.toml", "install")
    assert "restarted podwatch: " in said
    assert "training continued" in said
    assert pod.wait_running() == trainer
    assert "nothing to do" in pod.podwatch("install"), "without -c the installed configuration is meant"
    assert pod.status()["daemon"]["config_path"] == "/srv/pod/my config.toml"
    pod.run("chown", "65534", "/srv/pod/my config.toml")
    assert "chown" in pod.podwatch("-c", "/srv/pod/my config.toml", "install", check=False)
    pod.run("chown", "root", "/srv/pod/my config.toml")


# -- upgraded


def wheel_of(version: str, into: Path) -> Path:
    """The wheel of this tree with another version number."""
    tree = into / version
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        tree.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tree / name)
    for name in ("src", "systemd", "config"):
        shutil.copytree(REPO / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "src/podwatch/__init__.py"):
        text = (tree / name).read_text()
        (tree / name).write_text(text.replace(f'"{__version__}"', f'"{version}"'))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(into), str(tree)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return next(into.glob(f"podwatch-{version}-*.whl"))


def test_an_upgrade_keeps_the_supervisor_and_the_trainer(pod: Pod, tmp_path: Path) -> None:
    """Two versions of the wheel, one after the other, in one environment: what `pip install --upgrade` does."""
    new = "/opt/podwatch/bin/podwatch"
    wheels = pod.machine.root / "srv/pod/wheels"
    wheels.mkdir()
    names = [Path(shutil.copy(wheel_of(version, tmp_path), wheels)).name for version in ("0.1.0.dev1", "0.1.0.dev2")]
    pod.run(sys.executable, "-m", "venv", "/opt/podwatch")
    site = pod.run("/opt/podwatch/bin/python", "-c", "import site; print(site.getsitepackages()[0])").strip()
    pod.machine.write(f"{site}/dependencies.pth", f"{sysconfig.get_path('purelib')}\n")
    trainer, supervisor = pod.wait_running(), supervisor_of(pod)
    for name, said in zip(names, ("podwatch 0.1.0.dev1 ", "podwatch 0.1.0.dev2 (was 0.1.0.dev1) "), strict=True):
        pod.run("/opt/podwatch/bin/pip", "install", "-q", "--no-index", "--no-deps", f"/srv/pod/wheels/{name}")
        shown = pod.run(new, "install")
        assert "restarted podwatch: " in shown
        assert said in shown
        assert pod.wait_running() == trainer
        assert supervisor_of(pod) == supervisor
        assert "nothing to do" in pod.run(new, "install")
    endpoint = json.loads(pod.run("cat", f"/run/podwatch/{RUN}/endpoint.json"))
    assert endpoint["version"] == "0.1.0.dev2"
    assert new in pod.show("podwatch", "ExecStart")
    assert pod.events("trainer-adopted")[-1]["PID"] == str(trainer)


def supervisor_of(pod: Pod) -> int:
    supervisor: int = json.loads(pod.run("cat", f"/var/lib/podwatch/{RUN}/supervisor/record.json"))["supervisor"]
    return supervisor


# -- removed again


def test_uninstall_leaves_training_and_what_was_made_by_hand(pod: Pod) -> None:
    trainer = pod.wait_running()
    unit = "/etc/systemd/system/podwatch.service"
    said = pod.podwatch("uninstall", "--dry-run")
    assert f"would remove {unit}" in said
    assert pod.show("podwatch", "ActiveState") == "active"
    assert "ermission denied" in pod.run("setpriv", "--reuid=65534", PODWATCH, "uninstall", check=False)
    said = pod.podwatch("uninstall")
    assert f"removed   {unit}" in said
    assert f"it continues, without podwatch. To end it: systemctl stop podwatch-train-{RUN}" in said
    for path in (f"/var/lib/podwatch/{RUN}", f"{ROOT}/work/.podwatch/outputs", "/srv/pod/my config.toml"):
        assert path in said, said
    assert pod.show("podwatch", "LoadState") == "not-found" or pod.show("podwatch", "ActiveState") == "inactive"
    assert "No such file" in pod.run("ls", unit, check=False)
    assert "50-test.conf" in pod.run("ls", f"{unit}.d"), "an operator's drop-in stays"
    assert pod.trainer() == trainer
    assert "podwatch is not installed as a service here" in pod.podwatch("uninstall")
    assert pod.run("ls", f"/var/lib/podwatch/{RUN}/journal.sqlite").strip()
    assert "started podwatch" in pod.podwatch("install")
    assert pod.wait_running() == trainer


def test_what_uninstall_names_can_be_removed_and_the_other_run_keeps_its_data(pod: Pod) -> None:
    """The second run of this machine."""
    assert "started podwatch@second" in pod.podwatch("--run", "second", "install")
    pod.wait(lambda: pod.run("ls", "/var/lib/podwatch/second/journal.sqlite", check=False), 20, "its journal")
    said = pod.podwatch("--run", "second", "uninstall")
    assert "/etc/podwatch/second.toml" in said
    (remove,) = [line.split() for line in said.splitlines() if line.strip().startswith("rm -r ")]
    pod.run(*remove)
    for path in ("/var/lib/podwatch/second", "/run/podwatch/second", "/srv/second/.podwatch/outputs"):
        assert "No such file" in pod.run("ls", path, check=False), said
    assert pod.run("ls", "/var/lib/podwatch").split() == [RUN]
    assert pod.show("podwatch", "ActiveState") == "active"


# -- the machine goes


def test_a_machine_that_is_shut_down_is_a_preemption(pod: Pod) -> None:
    """The last one: there is no machine any more after it."""
    pod.wait_running()
    pod.machine.power_off()
    state = pod.machine.root / "var/lib/podwatch" / RUN
    journal = Journal.open(state / "journal.sqlite")
    last = [(str(e.name), e.message) for e in journal.events()][-8:]
    journal.close()
    run = json.loads((state / "run.json").read_text())
    said = "podwatch exits: the machine is being shut down; podwatch requests training to end"
    assert ("daemon-stopping", said) in last, last
    assert run["stopping"]["start_id"] == run["last_start"]["start_id"], "the next podwatch finishes it"
    assert run["history"].get("streak_count", 0) == 0, "and counts no failure"
    ended = [json.loads(path.read_text()) for path in (state / "supervisor").glob("exit-*.json")]
    newest = max(ended, key=lambda document: document["at_wall"])
    assert newest["code"] == 143 or newest["signal"] == signal.SIGTERM, newest
