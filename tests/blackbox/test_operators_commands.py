"""Commands of the operator beside training of another user: they run as that user, so that nothing that this user
writes runs as root; as root only where the configuration says so, and then away from that user's directories.

Needs root.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.strangers import needs_root, public_directory

pytestmark = [pytest.mark.slow, needs_root]

NOBODY = 65534


class Pod:
    def __init__(self, root: Path) -> None:
        self.root, self.theirs = root, root / "theirs"
        self.theirs.mkdir()
        os.chown(self.theirs, NOBODY, NOBODY)

    def check(self, more: str, user: str = "nobody") -> dict[str, tuple[str, str]]:
        """The lines of ``podwatch check``: name -> (level, text and fix)."""
        config = self.root / "podwatch.toml"
        config.write_text(f"""
run_id = "r"
state_dir = "{self.root}/state"
[trainer]
output_dir = "{self.theirs}/out"
cwd = "{self.theirs}"
command = ["true"]
{f'user = "{user}"' if user else ""}
{more}
""")
        config.chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-m", "podwatch", "-c", str(config), "check", "--json"],
            cwd="/", capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": os.environ["PATH"], "HOME": str(self.root), "PODWATCH_RUNTIME_DIR": str(self.root / "run")},
        )  # fmt: skip
        assert done.stdout, done.stderr
        lines = json.loads(done.stdout)["checks"]
        return {line["name"]: (line["level"], f"{line['text']} {line.get('fix', '')}") for line in lines}

    def run_check(self, more: str = "", user: str = "nobody") -> tuple[str, str]:
        """The result of one hook on ``check`` that says who it is, and where."""
        shown = '["sh", "-c", "echo uid=$(id -u) home=$HOME in $PWD; exit 10"]'
        lines = self.check(f'[[hooks]]\nname = "who"\non = ["check"]\ncommand = {shown}\n{more}', user)
        (found,) = (line for name, line in lines.items() if "who" in name)
        return found


@pytest.fixture
def pod() -> Iterator[Pod]:
    with public_directory() as directory:
        yield Pod(directory)


def test_a_command_runs_as_the_training_user(pod: Pod) -> None:
    _, text = pod.run_check()
    assert f"uid={NOBODY} home=/nonexistent in {pod.theirs}" in text


def test_as_root_it_runs_outside_of_the_training_users_directories(pod: Pod) -> None:
    _, text = pod.run_check('user = "root"')
    assert "uid=0 home=/root in /" in text
    assert str(pod.theirs) not in text


def test_as_root_in_a_directory_of_the_training_user_it_is_refused(pod: Pod) -> None:
    for cwd in (pod.theirs, pod.theirs / "below"):
        cwd.mkdir(exist_ok=True)
        level, text = pod.run_check(f'user = "root"\ncwd = "{cwd}"')
        assert (level, "another user could replace" in text) == ("fail", True), text
    (pod.root / "roots").mkdir()
    assert "uid=0" in pod.run_check(f'user = "root"\ncwd = "{pod.root}/roots"')[1]


@pytest.mark.parametrize(
    "command",
    [
        ["{theirs}/tool"],
        ["tool"],
        ["sh", "{theirs}/tool"],
        ["sh", "-e", "{theirs}/tool"],
        ["{root}/asks-env"],
        ["{python}", "-c", "import json"],
    ],
    ids=" ".join,
)
def test_as_root_it_runs_nothing_of_the_training_user(pod: Pod, command: list[str]) -> None:
    """Neither a program by its path or by the PATH of training, nor a script, nor a module by training's PYTHONPATH."""
    (pod.theirs / "json.py").write_text(f"open({str(pod.root / 'ran')!r}, 'w')\n")
    for path, text in (
        (pod.theirs / "tool", f"#!/bin/sh\ntouch {pod.root}/ran\n"),
        (pod.root / "asks-env", "#!/usr/bin/env tool\n"),
    ):
        path.write_text(text)
        path.chmod(0o755)
    words = [word.format(theirs=pod.theirs, root=pod.root, python=sys.executable) for word in command]
    env = f'env = {{ PATH = "{pod.theirs}:/usr/bin:/bin", PYTHONPATH = "{pod.theirs}" }}'
    lines = pod.check(f'{env}\n[[hooks]]\nname = "who"\non = ["check"]\nuser = "root"\ncommand = {json.dumps(words)}')
    assert any("who" in name for name in lines), "it was examined"
    assert not (pod.root / "ran").exists()


def test_as_root_a_notice_and_the_end_of_the_pod_run_nothing_of_the_training_user(pod: Pod) -> None:
    program = pod.theirs / "tool"
    program.write_text(f"#!/bin/sh\ntouch {pod.root}/ran\n")
    program.chmod(0o755)
    lines = pod.check(f'[notify]\nuser = "root"\ncommand = ["{program}"]')
    assert (lines["notify"][0], "another user" in lines["notify"][1]) == ("fail", True), lines["notify"]
    config = pod.root / "podwatch.toml"
    command = [sys.executable, "-m", "podwatch", "-c", str(config), "check", "--notify"]
    subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert not (pod.root / "ran").exists()


def test_without_a_training_user_commands_run_as_podwatch_does(pod: Pod) -> None:
    assert f"uid=0 home=/root in {pod.theirs}" in pod.run_check(user="")[1].replace(str(pod.root) + " ", "/root ")


def test_an_evaluation_of_the_training_user_needs_a_directory_that_they_can_enter(pod: Pod) -> None:
    config = pod.root / "podwatch.toml"
    pod.check("")
    config.write_text(config.read_text() + '[evaluation]\ncommand = ["true"]\nevery_saves = 1\n')
    command = [sys.executable, "-m", "podwatch", "-c", str(config), "config", "validate"]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "evaluation.dir" in done.stderr) == (78, True), done.stderr


def test_notices_go_to_a_command_that_runs_as_the_training_user(pod: Pod) -> None:
    told = pod.theirs / "told"
    for user, uid in (("", NOBODY), ("root", 0)):
        table = f'user = "{user}"\n' if user else ""
        script = f"id -u > {told}"
        pod.check(f'[notify]\ncommand = ["sh", "-c", "{script}"]\n{table}')
        config = pod.root / "podwatch.toml"
        command = [sys.executable, "-m", "podwatch", "-c", str(config), "check", "--notify"]
        subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)
        assert told.read_text().strip() == str(uid)
        told.unlink()


WANDB = """#!/bin/sh
echo "$(id -u) $HOME" >> {said}
[ "$2" = -c ] && echo 0.19.0 && exit
while read -r line; do printf '%s\\n' "$line" >> {orders}; echo '{{"ok": true, "why": "offline"}}'; done
"""


class OwnWandbRun:
    """``[wandb] python`` in a directory of ``owner``: a program that notes who runs it, and answers as W&B does."""

    def __init__(self, pod: Pod, owner: int) -> None:
        self.pod, self.venv = pod, pod.root / "venv" / "bin"
        self.said, self.orders = (pod.theirs / name for name in ("said", "orders"))
        self.venv.mkdir(parents=True)
        self.python = self.venv / "python"
        self.python.write_text(WANDB.format(said=self.said, orders=self.orders))
        self.python.chmod(0o755)
        for path in (self.venv.parent, self.venv, self.python):
            os.chown(path, owner, -1)

    def check(self, more: str = "", user: str = "nobody") -> tuple[str, str]:
        return self.pod.check(f'[wandb]\nenabled = true\npython = "{self.python}"\n{more}', user)["wandb run"]

    def notify(self) -> None:
        command = [sys.executable, "-m", "podwatch", "-c", str(self.pod.root / "podwatch.toml"), "check", "--notify"]
        subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=False)

    def runs(self) -> set[str]:
        return set(self.said.read_text().splitlines()) if self.said.exists() else set()


def test_the_wandb_run_of_podwatch_is_written_by_the_training_user(pod: Pod) -> None:
    """With a Python of the training user's own, in whose home W&B looks for the key."""
    run = OwnWandbRun(pod, NOBODY)
    level, text = run.check()
    assert (level, "0.19.0" in text) == ("ok", True), text
    run.notify()
    assert run.runs() == {f"{NOBODY} /nonexistent"}
    first, *_ = map(json.loads, run.orders.read_text().splitlines())
    assert first["init"]["dir"] == "", "that user chooses the directory"


def test_as_root_the_wandb_run_is_written_only_by_a_python_of_root(pod: Pod) -> None:
    run = OwnWandbRun(pod, NOBODY)
    level, text = run.check('user = "root"')
    assert (level, "another user" in text) == ("fail", True), text
    run.notify()
    assert run.runs() == set()
    for path in (run.venv.parent, run.venv, run.python):
        os.chown(path, 0, 0)
    assert run.check('user = "root"')[0] == "ok"
    run.notify()
    assert {line.split()[0] for line in run.runs()} == {"0"}
    first, *_ = map(json.loads, run.orders.read_text().splitlines())
    assert first["init"]["dir"].startswith(str(pod.root / "state"))


def test_without_a_training_user_the_wandb_run_is_podwatchs(pod: Pod) -> None:
    run = OwnWandbRun(pod, NOBODY)
    assert run.check(user="")[0] == "fail"
    assert run.check('user = "nobody"', user="")[0] == "ok"
    assert {line.split()[0] for line in run.runs()} == {str(NOBODY)}


@pytest.mark.parametrize("closed", ["program", "directory"])
def test_check_says_that_the_user_of_the_wandb_run_cannot_run_its_python(pod: Pod, closed: str) -> None:
    run = OwnWandbRun(pod, 0)
    (run.python if closed == "program" else run.venv.parent).chmod(0o700)
    level, text = run.check()
    assert (level, "nobody" in text, str(run.python) in text) == ("fail", True, True), text
    assert run.runs() == set()
