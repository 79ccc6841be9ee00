"""``podwatch runs check`` as real processes: no configuration, only a store."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from podwatch.domain.lease import Heartbeat
from podwatch.report.terminal_text import columns_of
from podwatch.store.keys import RunKeys
from tests.support import warm
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.stored_runs import aged, directory_of, past_run, put_beat

pytestmark = pytest.mark.slow

WORDS = {0: "OK", 1: "WARNING", 2: "CRITICAL", 3: "UNKNOWN"}


@pytest.fixture
def store(machine):
    return directory_of(machine.directory / "store")


def checked(machine, *arguments: str, code: int, **env: str) -> str:
    url = f"file://{machine.directory / 'store'}"
    done = machine.podwatch("runs", "check", *arguments, *([] if "--store" in arguments else ["--store", url]), **env)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout


def test_one_line_and_a_code_for_each_run(machine, store) -> None:
    past_run(store, RunKeys("well"), 10, 20)
    put_beat(store, RunKeys("well"))
    assert checked(machine, "well", code=0).startswith("OK well: step 25, ")
    assert "step 20 is stored" in checked(machine, "well", code=0)
    past_run(store, RunKeys("gone"), 10)
    store.put(RunKeys("gone").heartbeat, Heartbeat(state="running", host="pod-9", step=17).to_bytes())
    then = time.time() - 1000
    os.utime(store.root / RunKeys("gone").heartbeat, (then, then))
    lines = checked(machine, code=2).splitlines()
    assert [line.split(":")[0] for line in lines] == ["CRITICAL gone", "OK well"]
    assert "dead: no heartbeat from pod pod-9 since 16 min; its last step was 17; step 10 is stored" in lines[0]
    assert checked(machine, "gone", "--dead-after", "1h", code=1).startswith("WARNING gone: ")
    document = json.loads(checked(machine, "--json", code=2))
    assert (document["overall"], [r["level"] for r in document["runs"]]) == ("critical", ["critical", "ok"])
    assert document["runs"][1]["heartbeat"]["step"] == 25


def test_the_configured_run_without_arguments(machine, store) -> None:
    past_run(store, RunKeys("mine"), 10)
    past_run(store, RunKeys("other"), 10)
    put_beat(store, RunKeys("mine"), desired="finished", state="released")
    path = machine.directory / "podwatch.toml"
    path.write_text(
        f'run_id = "mine"\nstate_dir = "{machine.directory}/state"\n[trainer]\nlayout = "custom"\noutput_dir = '
        f'"{machine.directory}/out"\ncommand = ["true"]\n[checkpoints.custom]\nparts = "step_{{step}}"\nrequire = '
        f'["m"]\n[sync]\nstore = "file://{machine.directory / "store"}"\n'
    )
    path.chmod(0o600)
    done = machine.podwatch("runs", "check", "-c", str(path))
    assert (done.returncode, done.stdout) == (0, "OK mine: finished; step 10 is stored\n"), done.stderr


def test_a_manifest_that_is_gone(machine, store) -> None:
    past_run(store, RunKeys("r"), 10)
    put_beat(store, RunKeys("r"))
    next((machine.directory / "store" / "r").rglob("manifest.json")).unlink()
    assert "the newest checkpoint is not usable: the manifest of step 10" in checked(machine, "r", code=2)


def test_what_cannot_be_known(machine, store) -> None:
    assert "podwatch has written nothing here" in checked(machine, "nosuch", code=3)
    assert checked(machine, code=3).startswith("UNKNOWN: no runs in file://")
    assert checked(machine, "--store", "file:///nosuch/place", "r", code=3).startswith("UNKNOWN")
    assert checked(machine, "../x", "--store", "file:///tmp", code=3).startswith("UNKNOWN: not a valid run id")
    no_key = checked(machine, "r", "--store", "b2://some-bucket", code=3)
    assert no_key.startswith("UNKNOWN: ")
    assert "B2_APPLICATION_KEY" in no_key
    assert len(no_key.splitlines()) == 1
    document = json.loads(checked(machine, "r", "--json", "--store", "b2://some-bucket", code=3))
    assert (document["overall"], document["runs"]) == ("unknown", [])
    assert "B2_APPLICATION_KEY" in document["problem"]
    wrong_file = machine.directory / "wrong.toml"
    wrong_file.write_text("run_id = 3\n[trainer]\nnonsense = 1\n")
    configured = machine.podwatch("runs", "check", "-c", str(wrong_file))
    assert (configured.returncode, configured.stdout.count("\n")) == (3, 1), configured.stdout
    assert configured.stdout.startswith("UNKNOWN: ")
    wrong = machine.podwatch("runs", "check", "--dead-after", "soon", "--store", "file:///tmp")
    assert (wrong.returncode, "is not a duration" in wrong.stderr) == (3, True)
    assert machine.podwatch("runs", "check", "--nonsense").returncode == 3
    assert machine.podwatch("runs", "check", "--help").returncode == 0
    assert machine.podwatch("runs", "show", "--nonsense").returncode == 64, "only the two that monitoring calls"


def test_from_anywhere_with_a_key(machine, tmp_path) -> None:
    with B2Server(tmp_path / "b2") as server:
        env = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url}
        assert checked(machine, "r", "--store", f"b2://{BUCKET}", code=3, **env).startswith("UNKNOWN r: ")
        wrong = env | {"B2_APPLICATION_KEY": "K000wrong"}
        assert checked(machine, "r", "--store", f"b2://{BUCKET}", code=3, **wrong).startswith("UNKNOWN: ")
    gone = checked(machine, "r", "--store", f"b2://{BUCKET}", code=3, **env)
    assert gone.startswith("UNKNOWN: "), "a store that does not answer says nothing about the run"


def test_the_example_for_github_actions(machine, store) -> None:
    """Its command, as the runner's shell runs it: a warning does not fail the job, a dead run does."""
    example = Path(__file__).parents[2] / "examples" / "watching" / "github-actions.yml"
    (line,) = [x for x in example.read_text().splitlines() if "runs check" in x and x.lstrip().startswith("- run:")]
    command = line.partition("run:")[2].strip().replace("podwatch", f"{sys.executable} -m podwatch", 1)
    env = {**machine.env, "PODWATCH_STORE": f"file://{machine.directory / 'store'}"}

    def run() -> int:
        return subprocess.run(["bash", "-eo", "pipefail", "-c", command], env=env, cwd=machine.directory).returncode

    past_run(store, RunKeys("r"), 10)
    put_beat(store, RunKeys("r"), overall="warning", reason="the disk is 90 % full")
    assert run() == 0
    put_beat(store, RunKeys("r"), state="preempted")
    assert run() != 0


def test_an_archived_run_that_is_continued_is_judged_again(machine, store) -> None:
    past_run(store, RunKeys("r"), 10, 20)
    aged(store.root, 3)
    config = machine.directory / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\nstate_dir = "{machine.directory}/state"\n[trainer]\nlayout = "custom"\noutput_dir = '
        f'"{machine.directory}/out"\ncommand = ["true"]\n[checkpoints.custom]\nparts = "step_{{step}}"\nrequire = '
        f'["m"]\n[sync]\nstore = "file://{machine.directory / "store"}"\n'
    )
    config.chmod(0o600)
    done = machine.podwatch("runs", "archive", "r", "--yes", "-c", str(config))
    assert done.returncode == 0, done.stderr
    assert checked(machine, "r", code=0).startswith("OK r: archived; step 20 is stored")
    time.sleep(0.05)  # the store's times are those of the files
    put_beat(store, RunKeys("r"), state="preempted")
    assert "no pod holds the run" in checked(machine, "r", code=2)


def test_a_heartbeat_that_cannot_be_read(machine, store) -> None:
    past_run(store, RunKeys("r"), 10)
    store.put(RunKeys("r").heartbeat, b"{not json")
    assert "its heartbeat cannot be read" in checked(machine, "r", code=3)


AGE = re.compile(r"\d+ s\b")
"""It differs between two calls."""


@pytest.mark.parametrize("columns", [50, 80])
def test_on_a_terminal_lines_end_between_words(machine, store, columns: int) -> None:
    put_beat(store, RunKeys("r"), host="a-pod-with-a-rather-long-name", written_wall=time.time() - 3600)
    commands = (
        ("runs", "check", "--store", f"file://{machine.directory / 'store'}"),
        ("runs", "check", "r", "--store", "b2://some-bucket"),
        ("check",),
        ("events",),
        ("runs", "list", "--store", "b2://some-bucket"),
    )
    for command in commands:
        plain = machine.podwatch(*command)
        master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, columns))
        with os.fdopen(slave, "w") as screen:
            code = warm.start(
                "podwatch.__main__", command, cwd=machine.directory / "cwd", env=machine.env | {"NO_COLOR": "1"},
                streams=[slave, slave, slave],
            ).wait()  # fmt: skip
            shown = os.read(master, 1 << 16).decode()
            screen.close()
        os.close(master)
        assert code == plain.returncode
        assert all(columns_of(line) <= columns for line in shown.splitlines()), shown
        assert AGE.sub("", " ".join(shown.split())) == AGE.sub("", " ".join((plain.stdout + plain.stderr).split()))
