"""Every command as a real process: with a daemon, without one, and with bad input."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from podwatch.domain.event import Event, EventName
from podwatch.journal.bundle import capture
from podwatch.journal.journal import Journal
from podwatch.system.endpoint import RUNTIME_LINK, own_endpoint, write_endpoint


def configure(machine, *, extra: str = "") -> str:
    output = machine.directory / "outputs"
    output.mkdir(exist_ok=True)
    path = machine.directory / "podwatch.toml"
    path.write_text(
        f'run_id = "r"\nstate_dir = "{machine.directory}/state"\n{extra}\n'
        f'[trainer]\nlayout = "hf"\noutput_dir = "{output}"\ncommand = ["{sys.executable}", "train.py"]\n'
    )
    path.chmod(0o600)
    return str(path)


def test_version_and_help(machine):
    assert machine.podwatch("--version").stdout.startswith("podwatch 0.")
    help_text = machine.podwatch("--help").stdout
    daily, _, more = help_text.partition("\nMore commands:\n")
    daily = daily.partition("\nEvery day:\n")[2]
    assert len(re.findall(r"(?m)^  [a-z]", daily)) == 10
    for command in ("run", "status", "restart", "stop-training", "check", "events"):
        assert f"\n  {command} " in f"\n{daily}"
    for command in ("unpause", "store", "config", "controller"):
        assert f"\n  {command} " in f"\n{more}"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("statsu", "`podwatch status`"),
        ("stop", "`podwatch stop-training`"),
        ("wait", "`podwatch stop-training --wait`"),
        ("verify", "`podwatch checkpoints verify` or `podwatch store verify`"),
        ("runs lst", "`podwatch runs list`"),
        ("check --notifys", "--notify"),
    ],
)
def test_a_wrong_word_names_the_right_one(machine, wrong, meant):
    result = machine.podwatch(*wrong.split())
    assert result.returncode == 64
    assert "Did you mean" in result.stderr
    assert meant in result.stderr


def test_a_word_that_resembles_nothing_points_to_the_list(machine):
    assert "`podwatch --help`" in machine.podwatch("frobnicate").stderr


@pytest.mark.parametrize(
    "arguments", [("bogus",), ("start", "--bogus"), ("start", "--step", "-1"), ("start", "--step", "3", "--fresh")]
)
def test_usage_errors_are_64(machine, arguments):
    result = machine.podwatch(*arguments)
    assert result.returncode == 64
    assert "Error" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("start",), ("restart",), ("restart", "--dry-run"), ("stop-training",), ("sync",), ("prune",)]
)
def test_what_acts_says_that_there_is_no_daemon(machine, arguments):
    result = machine.podwatch(*arguments)
    assert result.returncode == 69
    assert result.stderr.startswith("podwatch: cannot ")
    assert ": podwatch is not running (" in result.stderr
    assert "podwatch run" in result.stderr
    assert result.stderr.count("\n") == 1


def test_preempt_without_a_daemon_does_not_ask_to_start_one(machine):
    result = machine.podwatch("preempt")
    assert result.returncode == 69
    assert "send training SIGTERM yourself" in result.stderr


def test_a_status_without_facts_has_no_hole_in_it(machine):
    assert "\n\n\n" not in machine.podwatch("status").stdout


def test_acting_through_the_socket(guarded):
    result = guarded.podwatch("restart", "--step", "80")
    assert (result.returncode, result.stdout) == (0, "restarting from step 80\n")
    assert json.loads(guarded.podwatch("start", "--json").stdout)["message"]


def test_a_refusal_keeps_its_words_and_its_exit_code(guarded):
    result = guarded.podwatch("stop-training")
    assert result.returncode == 75
    assert result.stderr == "podwatch: a save is in flight (step 85): try again in a minute\n"


def test_restart_dry_run_shows_names_only(guarded):
    text = guarded.podwatch("restart", "--dry-run").stdout
    assert "step 80" in text
    assert "'my config.toml'" in text
    assert "WANDB_API_KEY" in text
    assert "moves     1 to quarantine" in text


def test_prune_dry_run_explains(guarded):
    text = guarded.podwatch("prune", "--dry-run").stdout
    assert "remove   step 80" in text
    assert "47 GB  stored" in text


def test_events_and_incidents_from_the_daemon(guarded):
    line = json.loads(guarded.podwatch("events", "--json").stdout)
    assert (line["id"], line["name"]) == (7, "published")
    assert "step 80 is in the store" in guarded.podwatch("events").stdout
    assert (
        "from 71.0 to 0.0 GiB (confirmed by CUDA context on gpu0, engine process, health) -> restarted"
        in guarded.podwatch("incidents").stdout
    )
    text = guarded.podwatch("incidents", "1").stdout
    assert "evidence  health: refused at http://127.0.0.1:8000 (confirms it)" in text
    assert guarded.podwatch("incidents", "2").returncode == 64


@pytest.mark.parametrize(
    ("words", "code"),
    [("pause --for soon", 64), ("pause --for 0s", 64), ("runs check --store file:///x --dead-after soon", 3)],
)
def test_a_duration_that_is_none_is_refused_in_one_line(machine, words, code):
    refused = machine.podwatch(*words.split())
    assert (refused.returncode, len(refused.stderr.splitlines())) == (code, 1)
    assert "5m" in refused.stderr


def test_checkpoints_from_the_daemon(guarded):
    assert "uploading" in guarded.podwatch("checkpoints").stdout


def test_commands_use_the_configuration_of_the_podwatch_that_runs(machine):
    """It was started with -c; the commands are typed elsewhere."""
    config = configure(machine)
    assert machine.podwatch("quarantine", "list").returncode == 78
    (machine.runtime / "r").mkdir()
    write_endpoint(machine.runtime / "r", own_endpoint("r", started_wall=time.time(), config_path=config))
    assert machine.podwatch("quarantine", "list").stdout == "the quarantine is empty\n"
    assert "no complete checkpoint to check" in machine.podwatch("checkpoints", "verify").stdout


def test_events_without_a_daemon_come_from_the_journal(machine):
    config = configure(machine)
    assert machine.podwatch("-c", config, "events").returncode == 69
    journal = Journal.open(machine.directory / "state" / "r" / "journal.sqlite")
    journal.add_event(Event(EventName.PUBLISHED, time.time() - 7200, "old"))
    journal.add_event(Event(EventName.PRUNED, time.time() - 60, "new \x1b[2J"))
    journal.open_incident("hang", "no step for 40 min")
    journal.close()
    text = machine.podwatch("events", "-c", config).stdout
    assert "old" in text
    assert "\x1b" not in text
    recent = machine.podwatch("events", "-c", config, "--since", "1h", "--json").stdout.splitlines()
    assert [json.loads(x)["name"] for x in recent] == ["pruned"]
    assert "hang: no step for 40 min -> still open" in machine.podwatch("incidents", "-c", config).stdout
    bad = machine.podwatch("events", "-c", config, "--since", "yesterday")
    assert bad.returncode == 64
    assert "2h" in bad.stderr


def test_an_incident_shows_what_the_engine_said(machine):
    config = configure(machine)
    journal = Journal.open(machine.directory / "state" / "r" / "journal.sqlite")
    incident = journal.open_incident("silent-death", "the engine died", opened_wall=time.time() - 70)
    tails = {"logs/inference.stdout": ["INFO ready", "RuntimeError: CUDA error \x1b[2J"], "trainer.log": ["Step 5"]}
    bundle = capture(machine.directory / "state" / "r" / "incidents" / "1", log_tails=tails)
    done = {"resolution": "restarted from step 5", "lost_steps": 6, "closed_wall": incident.opened_wall + 77}
    journal.update_incident(incident.id, bundle=str(bundle), **done)
    journal.close()
    assert (
        "died -> restarted from step 5 (6 steps lost, no training for 77 s)"
        in machine.podwatch("incidents", "-c", config).stdout
    )
    lines = machine.podwatch("incidents", "-c", config, "1").stdout.splitlines()
    assert "lost      6 steps" in lines
    assert any(line.endswith("after 77 s") for line in lines)
    assert lines[-2].startswith("log       logs_inference.stdout: RuntimeError: CUDA error")
    assert lines[-1] == "log       trainer.log: Step 5"
    assert "\x1b" not in "".join(lines)
    log = tails | {"trainer.log": ["Step 5", "loading", "ValueError: nan"]}
    capture(machine.directory / "state" / "r" / "incidents" / "2", log_tails=log)
    journal = Journal.open(machine.directory / "state" / "r" / "journal.sqlite")
    again = journal.open_incident("trainer-exited", "the trainer ended")
    journal.update_incident(again.id, bundle=str(bundle.with_name("2")))
    journal.close()
    said = [line for line in machine.podwatch("incidents", "-c", config, "2").stdout.splitlines() if "log  " in line]
    assert said == ["log       trainer.log: ValueError: nan"], "the engine's error belongs to incident 1"


def test_checkpoints_without_a_daemon(machine):
    config = configure(machine)
    result = machine.podwatch("checkpoints", "-c", config)
    assert result.returncode == 0
    said = " ".join(result.stdout.split())
    assert said.startswith("no checkpoints on this pod (layout ")
    assert f"searched {machine.directory / 'outputs'}" in said
    (machine.directory / "outputs" / "checkpoint-7").mkdir()
    (machine.directory / "outputs" / "checkpoint-7" / "trainer_state.json").write_text("{")
    sets = json.loads(machine.podwatch("checkpoints", "-c", config, "--json").stdout)["sets"]
    assert [(s["step"], s["completeness"] == "complete", s["stored"]) for s in sets] == [(7, False, None)]


def test_a_missing_or_broken_configuration_is_78(machine):
    result = machine.podwatch("checkpoints", "-c", "/nowhere.toml")
    assert result.returncode == 78
    assert "/nowhere.toml" in result.stderr
    bad = machine.directory / "bad.toml"
    bad.write_text("run_id = [\n")
    bad.chmod(0o600)
    assert machine.podwatch("events", "-c", str(bad)).returncode == 78


def test_the_state_dir_of_the_named_file_is_searched(machine):
    config = configure(machine)
    machine.env.pop("PODWATCH_RUNTIME_DIR")
    machine.daemon("running")
    (published,) = machine.runtime.iterdir()
    state = machine.directory / "state" / published.name
    state.mkdir(parents=True)
    (state / RUNTIME_LINK).symlink_to(published)
    text = (machine.directory / "podwatch.toml").read_text().replace('"r"', '"bs4-qwen3-8b"')
    (machine.directory / "podwatch.toml").write_text(text)
    assert "at step 85" in machine.podwatch("status", "-c", config).stdout
    assert machine.podwatch("status", PODWATCH_CONFIG=config).returncode == 0


def test_logs_print_the_end_and_follow_a_rotation(machine):
    log = machine.directory / "trainer.log"
    log.write_text("".join(f"line {n}\n" for n in range(200)))
    run = machine.runtime / "r"
    run.mkdir()
    from podwatch.system.endpoint import Endpoint, write_document

    write_endpoint(run, Endpoint("r", 1, stopped_wall=time.time()))
    write_document(run / "status.json", {"training": {"log_path": str(log)}})
    assert machine.podwatch("logs", "-n", "2").stdout == "line 198\nline 199\n"
    with log.open("a") as more:
        more.write("half a li")
    assert machine.podwatch("logs", "-n", "1").stdout == "half a li"
    with log.open("a") as more:
        more.write("ne\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "podwatch", "logs", "-f", "-n", "1"], stdout=subprocess.PIPE, text=True, env=machine.env
    )
    try:
        assert process.stdout.readline() == "half a line\n"
        log.rename(log.with_suffix(".1"))
        log.write_text("after the rotation\n")
        assert process.stdout.readline() == "after the rotation\n"
    finally:
        process.kill()
        process.communicate()


def test_check_reports_every_line_and_fails_on_a_missing_command(machine):
    config = configure(machine)
    result = machine.podwatch("check", "-c", config, "--json")
    report = json.loads(result.stdout)
    levels = {}
    for check in report["checks"]:
        levels.setdefault(check["name"], check["level"])
    assert levels["config"] == "ok"
    assert levels["command"] == "ok"
    assert levels["store"] == "warn"
    assert {"gpu", "disk", "nofile", "http", "systemd"} <= set(levels)
    assert all(c["fix"] for c in report["checks"] if c["level"] == "fail")
    text = (machine.directory / "podwatch.toml").read_text().replace(sys.executable, "no-such-trainer")
    (machine.directory / "podwatch.toml").write_text(text)
    result = machine.podwatch("check", "-c", config)
    assert result.returncode == 1
    assert "fail  command     no-such-trainer not found" in result.stdout
    assert "do: use an absolute path" in result.stdout


def test_check_without_a_configuration_is_78(machine):
    result = machine.podwatch("check", "-c", "/nowhere.toml")
    assert result.returncode == 78
    assert result.stdout.startswith("fail  config")


def test_check_lists_every_problem_of_the_configuration(machine):
    config = machine.directory / "broken.toml"
    config.write_text('run_id = "x"\n[gpu]\npol = "2s"\n[trainer]\noutput_dirr = "/x"\n')
    result = machine.podwatch("check", "-c", str(config))
    assert result.returncode == 78
    lines = [line for line in result.stdout.splitlines() if line.startswith("fail  config")]
    assert sorted(line.split('"')[1] for line in lines) == ["output_dir", "output_dirr", "pol"]
    assert all(str(config) in line for line in lines)


def test_check_refuses_a_backup_on_the_same_disk(machine):
    config = configure(machine, extra=f'sync.store = "file://{machine.directory}/store"')
    result = machine.podwatch("check", "-c", config)
    assert result.returncode == 1
    assert "on the filesystem of output_dir" in result.stdout


def test_check_counts_the_disk_as_status_does(machine):
    """Blocks reserved for root are no room; and with a capacity the host's own use means nothing."""
    figures = os.statvfs(machine.directory)
    text = machine.podwatch("check", "-c", configure(machine)).stdout
    used = int(re.search(r"disk +(\d+)% of", text)[1])
    assert used == pytest.approx(100 * (1 - figures.f_bavail / figures.f_blocks), abs=2)
    free = figures.f_bavail * figures.f_frsize
    text = machine.podwatch("check", "-c", configure(machine, extra=f"disk.capacity = {free // 2}")).stdout
    assert re.search(r"disk +0% of", text)


def test_a_reader_that_leaves_is_not_an_error(guarded):
    command = f"{sys.executable} -m podwatch status --json | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=guarded.env)
    assert result.stderr == ""


def test_no_traceback_unless_asked(machine):
    config = configure(machine)
    result = machine.podwatch("-c", config, "incidents")
    assert "Traceback" not in result.stderr
    assert "Traceback" in machine.podwatch("-c", config, "incidents", PODWATCH_DEBUG="1").stderr


def test_a_restart_that_is_not_possible_says_why():
    from podwatch.cli.training import describe

    lines = describe({"possible": False, "reason": "no command", "changed_since_last_start": ["config.toml"]})
    assert lines == ["not possible: no command", "changed since the last start: config.toml"]


def test_prune_names_parts_and_paths():
    from podwatch.cli.checkpoints import describe_plan

    entries = [
        {"action": "remove", "step": 80, "part": "weights", "size_bytes": 16_000_000_000, "reason": "stored"},
        {"action": "remove", "step": None, "path": "/app/trash/1", "size_bytes": 1, "reason": "trash"},
        {"action": "keep", "step": 85, "size_bytes": None, "reason": "newest complete"},
    ]
    lines = describe_plan({"entries": entries, "message": "16 GB"})
    assert lines[0] == "remove   step 80 weights     16 GB  stored"
    assert "/app/trash/1" in lines[1]
    assert "?" not in lines[2]


def test_pins_without_a_daemon(machine):
    config = configure(machine)
    assert machine.podwatch("checkpoints", "unpin", "7", "-c", config).returncode == 64
    result = machine.podwatch("checkpoints", "pin", "7", "--reason", "figure 2", "-c", config)
    assert (result.returncode, "pinned" in result.stdout) == (0, True), result.stderr
    record = json.loads((machine.directory / "state" / "r" / "run.json").read_text())
    assert record["pins"] == {"7": "figure 2"}
    assert machine.podwatch("checkpoints", "unpin", "7", "-c", config).returncode == 0


def test_a_daemon_with_another_runtime_directory_is_found_by_its_state_directory(machine):
    config = configure(machine)
    state, elsewhere = machine.directory / "state" / "r", machine.directory / "elsewhere" / "r"
    for directory in (state, elsewhere):
        directory.mkdir(parents=True, exist_ok=True)
    write_endpoint(elsewhere, own_endpoint("r", started_wall=1.0), state)
    result = machine.podwatch("status", "-c", config)
    assert result.returncode == 3
    assert "PODWATCH DOES NOT ANSWER" in result.stdout, "no socket here"
    refused = machine.podwatch("stop-training", "-c", config)
    assert (refused.returncode, str(elsewhere) in refused.stderr) == (69, True)
    (state / "runtime").unlink()
    result = machine.podwatch("status", "-c", config)
    assert "PODWATCH IS NOT RUNNING" in result.stdout
    assert str(machine.runtime) in "".join(result.stdout.split())
    assert f"do:podwatchrun-c{config}" in "".join(result.stdout.split())
