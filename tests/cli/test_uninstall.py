"""``podwatch uninstall`` on real directories: it lists what stays, and the `rm -r` for what is podwatch's own and this
run's. The service itself: tests/suites/systemd."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwatch.cli import root
from podwatch.domain.run_state import RunState
from podwatch.journal import Journal
from podwatch.recovery import quarantine
from podwatch.system.endpoint import own_endpoint, write_endpoint
from podwatch.system.own_directories import Workspace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@dataclass
class Pod:
    """A pod on which a run trained up to step 20 and was taken back to step 10."""

    root: Path

    @property
    def output(self) -> Path:
        return self.root / "outputs"

    @property
    def beside(self) -> Path:
        return self.root / ".podwatch" / "outputs"

    @property
    def state(self) -> Path:
        return self.root / "state" / "r"

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.output)

    def podwatch(self, *arguments: str) -> "Done":
        """In this process: that is quicker."""
        out, err = io.StringIO(), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            patch.setenv("PODWATCH_RUNTIME_DIR", str(self.root / "run"))
            patch.setattr(sys, "argv", ["podwatch", *arguments, "-c", str(self.root / "podwatch.toml")])
            with pytest.raises(SystemExit) as ended:
                root.run(root.cli)
        return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    def picture(self) -> dict[str, bytes]:
        """Everything but the store, links as themselves."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            if path.is_symlink():
                found[str(path)] = str(path.readlink()).encode()
            elif path.is_file() and "store" not in path.relative_to(self.root).parts:
                found[str(path)] = path.read_bytes()
        return found


def save(pod: Pod, step: int) -> Path:
    directory = pod.output / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (directory / "model.safetensors").write_bytes(f"weights of step {step}".encode())
    return directory


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    """Step 20 was moved to quarantine."""
    made = Pod(tmp_path / "pod")
    made.root.mkdir()
    for step in (10, 20):
        save(made, step)
    # A card of its own: without one, a process of another test that holds NVIDIA's files passes for this training.
    (made.root / "podwatch.toml").write_text(
        f'run_id = "r"\nstate_dir = "{made.root}/state"\n[trainer]\nlayout = "hf"\noutput_dir = "{made.output}"\n'
        f'command = ["{sys.executable}", "train.py"]\n[gpu]\ninference = [61]\n'
        f'[sync]\nstore = "file://{made.root}/store"\n'
    )
    (made.root / "podwatch.toml").chmod(0o600)
    Journal.open(made.state / "journal.sqlite").close()
    (made.state / "incidents" / "1").mkdir(parents=True)
    (made.state / "incidents" / "1" / "finding.json").write_text("{}")
    (made.root / "run" / "r").mkdir(parents=True)
    (made.root / "run" / "r" / "status.json").write_text("{}")
    (made.root / "store").mkdir()
    workspace = made.workspace.probe()
    write_copy(made, "r")
    quarantine.make_spare(workspace)
    moved(made, 20, number=1)
    return made


def write_copy(pod: Pod, run_id: str) -> None:
    """Only the copy beside output_dir: what is in the state directory says nothing about that directory."""
    path = pod.workspace.probe().run_copy
    path.write_bytes(RunState(run_id, counter=1).to_bytes())


def moved(pod: Pod, step: int, *, number: int) -> None:
    paths = [pod.output / f"checkpoint-{step}"]
    data = quarantine.plan(paths, step=10, steps={step: "complete"}, lineage="line", wall=1.0, number=number)
    quarantine.carry_out(pod.workspace.probe(), data)


# -- the ordinary case


def test_everything_stays_and_is_listed(pod: Pod) -> None:
    before = pod.picture()
    done = pod.podwatch("uninstall")
    assert done.returncode == 0, done.stderr
    assert pod.picture() == before
    assert "podwatch is not installed as a service here" in done.stdout
    for path in (pod.state, pod.beside, pod.root / "run/r", pod.root / "podwatch.toml", pod.output):
        assert str(path) in done.stdout, path
    assert "podwatch quarantine list" in done.stdout
    assert f"file://{pod.root}/store  (objects of the run r)" in done.stdout


def test_the_rm_that_it_prints_removes_all_that_is_podwatch_s_and_nothing_of_training(pod: Pod) -> None:
    training = {p: p.read_bytes() for p in pod.output.rglob("*") if p.is_file()}
    other = pod.root / ".podwatch/other/run.json"
    other.parent.mkdir()
    other.write_text("{}")
    (line,) = [one for one in pod.podwatch("uninstall").stdout.splitlines() if one.startswith("  rm -r ")]
    subprocess.run(line, shell=True, check=True)
    assert not pod.state.exists()
    assert not pod.beside.exists()
    assert not (pod.root / "run/r").exists()
    assert other.exists()
    assert training == {p: p.read_bytes() for p in pod.output.rglob("*") if p.is_file()}
    assert "rm -r" not in pod.podwatch("uninstall").stdout


@pytest.mark.parametrize("record", ["", "{", '{"schema_version": 99}', "another"])
def test_the_directory_of_another_run_is_not_in_the_rm(pod: Pod, record: str) -> None:
    if record == "another":
        write_copy(pod, "another")
    elif record:
        (pod.beside / "run.json").write_text(record)
    else:
        (pod.beside / "run.json").unlink()
    (line,) = [one for one in pod.podwatch("uninstall").stdout.splitlines() if one.startswith("  rm -r ")]
    assert str(pod.beside) not in line
    assert str(pod.state) in line


# -- while something runs, and with a broken configuration


def test_the_pid_to_end_is_that_of_the_parent_which_restarts_podwatch(pod: Pod) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    try:
        (pod.root / "run/r/init.pid").write_text(f"{parent.pid}\n")
        write_endpoint(pod.root / "run" / "r", own_endpoint("r", started_wall=1.0))
        listed = pod.podwatch("uninstall")
        assert f"podwatch guards the run without a service: kill {parent.pid} ends it" in listed.stdout
    finally:
        parent.kill()
        parent.wait()


def test_a_podwatch_whose_end_ends_training_is_not_said_to_leave_it_running(pod: Pod) -> None:
    """`podwatch run --job`, by the argument of its init."""
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--job"])
    try:
        (pod.root / "run/r/init.pid").write_text(f"{parent.pid}\n")
        write_endpoint(pod.root / "run" / "r", own_endpoint("r", started_wall=1.0))
        listed = pod.podwatch("uninstall")
        assert f"kill {parent.pid} ends it and training" in listed.stdout
    finally:
        parent.kill()
        parent.wait()


def test_a_broken_configuration_is_named(pod: Pod) -> None:
    (pod.root / "podwatch.toml").write_text("run_id = \n")
    before = pod.picture()
    listed = pod.podwatch("uninstall")
    assert (listed.returncode, pod.picture()) == (0, before)
    assert "not known: " in listed.stdout
