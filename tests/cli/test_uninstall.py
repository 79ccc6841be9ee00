"""``podwatch uninstall --purge`` on real directories: it removes what is podwatch's own and this run's, nothing else; a
checkpoint that exists only in quarantine needs a second yes. The service itself: tests/suites/systemd."""

import contextlib
import io
import json
import os
import pty
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwatch.cli import root
from podwatch.domain.manifest import Keys, Manifest, ManifestFile
from podwatch.domain.run import Intent, IntentKind, Lineage, RunRecord
from podwatch.journal import Journal, save_run_record
from podwatch.policy.lost_by_purge import KeptFile, StoredFile, is_stored
from podwatch.recovery import quarantine
from podwatch.stores.local import LocalStore
from podwatch.system.files import FileLock
from podwatch.system.own_directories import Workspace
from tests.support import warm
from tests.support.put_file import put_file
from tests.support.stored_set import NOW, point

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
as_root = pytest.mark.root
T = 61_017


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

    def podwatch(self, *arguments: str, typed: str = "") -> "Done":
        """In this process (that is quicker), or with ``typed`` as a process on a terminal."""
        line = [*arguments, "-c", str(self.root / "podwatch.toml")]
        runtime = {"PODWATCH_RUNTIME_DIR": str(self.root / "run")}
        if typed:
            return self._on_a_terminal(line, typed, {**os.environ, **runtime})
        out, err = io.StringIO(), io.StringIO()
        with (
            Path(os.devnull).open() as nothing,
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name, value in runtime.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["podwatch", *line])
            patch.setattr(sys, "stdin", nothing)
            with pytest.raises(SystemExit) as ended:
                root.run(root.cli)
        return Done(int(ended.value.code or 0), out.getvalue(), err.getvalue())

    @staticmethod
    def _on_a_terminal(line: list[str], typed: str, environ: dict[str, str]) -> "Done":
        master, slave = pty.openpty()
        os.write(master, typed.encode())
        try:
            ended = warm.podwatch(*line, env=environ, stdin=slave)
        finally:
            os.close(master)
            os.close(slave)
        return Done(ended.returncode, ended.stdout, ended.stderr)

    def purge(self, *more: str) -> "Done":
        return self.podwatch("uninstall", "--purge", "--yes", *more)

    def store(self) -> LocalStore:
        return LocalStore(self.root / "store", writer_id="w")

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
    """Step 20 is stored and then moved to quarantine, with step 30, which is stored nowhere."""
    made = Pod(tmp_path / "pod")
    made.root.mkdir()
    for step in (10, 20, 30):
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
    put(made, 20)
    workspace = made.workspace.probe()
    save_run_record(workspace, RunRecord("r", Lineage("line")))
    quarantine.make_spare(workspace)
    moved(made, 20, number=1)
    return made


def put(pod: Pod, step: int) -> None:
    """Store the checkpoint as podwatch would, with the files' own times."""
    keys, files = Keys("r"), []
    for path in sorted((pod.output / f"checkpoint-{step}").iterdir()):
        status, name = path.stat(), f"checkpoint/{path.name}"
        with path.open("rb") as stream:
            sent = put_file(pod.store(), keys.data(step, "save", name), stream, status.st_size, part_size=5_000_000)
        files.append(
            ManifestFile(
                name, "checkpoint", status.st_size, status.st_mtime_ns, 0o644, sent.key, sent.file_id, sent.parts_sha1
            )
        )
    total = sum(f.size for f in files)
    made = Manifest("r", "line", step, "save", "hf", NOW, "w", 5_000_000, total, tuple(files))
    point(pod.store(), keys, made, 1)


def moved(pod: Pod, step: int, *, number: int, state: str = "complete") -> None:
    paths = [pod.output / f"checkpoint-{step}"]
    data = quarantine.plan(paths, step=10, steps={step: state}, lineage="line", wall=1.0, number=number)
    quarantine.carry_out(pod.workspace.probe(), Intent(number, IntentKind.QUARANTINE, 1.0, data))


# -- the ordinary case


def test_without_purge_everything_stays_and_is_listed(pod: Pod) -> None:
    before = pod.picture()
    done = pod.podwatch("uninstall")
    assert done.returncode == 0, done.stderr
    assert pod.picture() == before
    assert "podwatch is not installed as a service here" in done.stdout
    for path in (pod.state, pod.beside / "quarantine/1", pod.beside / "run.json", pod.root / "run/r", pod.output):
        assert str(path) in done.stdout, path
    assert "step 20 (complete)" in done.stdout
    assert f"file://{pod.root}/store  (objects of the run r)" in done.stdout
    document = json.loads(pod.podwatch("uninstall", "--json").stdout)
    sizes = {item["path"]: item["bytes"] for item in document["items"]}
    assert sizes[str(pod.state)] > 0 < sizes[str(pod.beside / "quarantine/1")]
    assert (document["removed"], document["training"]) == ([], None)


def test_purge_removes_all_that_is_podwatch_s_and_nothing_of_training(pod: Pod) -> None:
    training = {p: p.read_bytes() for p in pod.output.rglob("*") if p.is_file()}
    dry = pod.podwatch("uninstall", "--purge", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "would remove for good:" in dry.stdout
    assert "NOT IN THE STORE" not in dry.stdout
    done = pod.purge()
    assert done.returncode == 0, done.stderr
    assert not pod.state.exists()
    assert not (pod.root / ".podwatch").exists()
    assert not (pod.root / "run" / "r").exists()
    assert training == {p: p.read_bytes() for p in pod.output.rglob("*") if p.is_file()}
    assert [s.step for s in _stored(pod)] == [20]
    assert (pod.root / "podwatch.toml").exists(), "a configuration outside /etc/podwatch is the operator's"
    assert "removed" in done.stdout
    again = pod.purge()
    assert again.returncode == 0, again.stderr


def _stored(pod: Pod) -> list[object]:
    from podwatch.sync.inventory import inventory

    return inventory(pod.store(), Keys("r"))[0]  # type: ignore[return-value]


def test_purge_asks_and_a_no_changes_nothing(pod: Pod) -> None:
    before = pod.picture()
    unasked = pod.podwatch("uninstall", "--purge")
    assert (unasked.returncode, pod.picture()) == (64, before)
    refused = pod.podwatch("uninstall", "--purge", typed="n\n")
    assert (refused.returncode, pod.picture()) == (1, before)
    assert "podwatch removes for good:" in refused.stderr
    assert pod.podwatch("uninstall", "--purge", typed="y\n").returncode == 0
    assert not pod.state.exists()


# -- checkpoints that exist nowhere else


def test_a_quarantined_checkpoint_that_is_stored_nowhere_needs_a_second_yes(pod: Pod) -> None:
    moved(pod, 30, number=2)
    before = pod.picture()
    refused = pod.purge()
    assert (refused.returncode, pod.picture()) == (64, before)
    assert f"step 30 in {pod.beside}/quarantine/2" in refused.stderr
    assert "step 20" not in refused.stderr
    assert "quarantine return" in refused.stderr
    once = pod.podwatch("uninstall", "--purge", typed="y\nyes\n")
    assert (once.returncode, pod.picture()) == (1, before), "the second question wants the word"
    assert pod.podwatch("uninstall", "--purge", typed="y\ndelete\n").returncode == 0
    assert not pod.beside.exists()


def test_the_option_is_a_second_yes(pod: Pod) -> None:
    moved(pod, 30, number=2)
    assert pod.purge("--discard-unstored").returncode == 0
    assert not pod.beside.exists()


def test_a_step_saved_again_with_other_weights_is_not_the_stored_one(pod: Pod) -> None:
    again = save(pod, 20)
    (again / "model.safetensors").write_bytes(b"weights of step 21")  # the same size, another time
    moved(pod, 20, number=2)
    refused = pod.purge()
    assert refused.returncode == 64
    assert f"step 20 in {pod.beside}/quarantine/2" in refused.stderr
    assert f"{pod.beside}/quarantine/1" not in refused.stderr


def test_a_stored_checkpoint_that_lost_an_object_does_not_count(pod: Pod) -> None:
    (saved,) = _stored(pod)
    key = next(f.key for f in saved.manifest.files if f.path.endswith("model.safetensors"))  # type: ignore[attr-defined]
    (pod.root / "store" / key).unlink()
    assert f"step 20 in {pod.beside}/quarantine/1" in pod.purge().stderr


def test_without_an_answer_of_the_store_nothing_counts_as_stored(pod: Pod) -> None:
    before = pod.picture()
    shutil.rmtree(pod.root / "store")
    (pod.root / "store").write_text("not a directory")
    refused = pod.purge()
    assert refused.returncode == 64, refused.stdout
    assert f"step 20 in {pod.beside}/quarantine/1" in refused.stderr
    assert {k: v for k, v in pod.picture().items() if not k.endswith("/store")} == before


def test_by_products_and_incomplete_checkpoints_need_no_second_yes(pod: Pod) -> None:
    moved(pod, 30, number=2, state="incomplete")
    assert pod.purge().returncode == 0


def test_a_quarantine_without_a_usable_index_is_never_removed(pod: Pod) -> None:
    (pod.beside / "quarantine/1/index.json").write_text("[]")
    kept = pod.beside / "quarantine/1/0-checkpoint-20/model.safetensors"
    done = pod.purge()
    assert done.returncode == 0
    assert kept.read_bytes() == b"weights of step 20"
    assert "its contents are unknown" in done.stdout
    assert (pod.beside / "run.json").exists(), "the record says whose it is"


def test_hard_links_that_are_the_only_copy_count_like_a_checkpoint(pod: Pod) -> None:
    place = pod.beside / "uploading" / "30.save-30" / "checkpoint"
    place.mkdir(parents=True)
    os.link(pod.output / "checkpoint-30/model.safetensors", place / "model.safetensors")
    assert "NOT IN THE STORE" not in pod.podwatch("uninstall", "--purge", "--dry-run").stdout
    shutil.rmtree(pod.output / "checkpoint-30")
    assert "step 30 in" in pod.purge().stderr
    assert (place / "model.safetensors").exists()


def test_stored_means_every_file_by_place_size_and_time() -> None:
    kept = [KeptFile("/o/checkpoint-5/a", 1, 10), KeptFile("/o/checkpoint-5/sub/b", 2, 20), KeptFile("/o/r/x", 3, 3)]
    stored = [StoredFile("a", 1, 10), StoredFile("sub/b", 2, 20)]
    assert is_stored(kept, stored)
    assert is_stored(kept, stored[:1])
    assert not is_stored(kept, [])
    for wrong in (StoredFile("a", 2, 10), StoredFile("a", 1, 11), StoredFile("-5/a", 1, 10), StoredFile("c", 1, 10)):
        assert not is_stored(kept, [stored[1], wrong]), wrong


# -- what only looks like this run's


def victim(pod: Pod) -> Path:
    place = pod.root / "victim"
    for name in ("journal.sqlite", "1/0-checkpoint-9/model.bin", "status.json", "run.json"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("not podwatch's")
    return place


@pytest.mark.parametrize(
    "place", ["state/r", "run/r", ".podwatch/outputs", ".podwatch/outputs/quarantine", ".podwatch"]
)
def test_a_directory_that_became_a_link_is_left_and_so_is_its_target(pod: Pod, place: str) -> None:
    target = victim(pod)
    before = {p: p.read_text() for p in target.rglob("*") if p.is_file()}
    path = pod.root / place
    path.rename(pod.root / "moved-away")
    path.symlink_to(target)
    done = pod.purge("--discard-unstored")
    assert before == {p: p.read_text() for p in target.rglob("*") if p.is_file()}, done.stdout + done.stderr
    assert path.is_symlink()
    assert list((pod.root / "moved-away").iterdir())


def test_a_link_in_quarantine_is_removed_and_its_target_is_not(pod: Pod) -> None:
    target = victim(pod)
    (pod.beside / "quarantine/1/1-link").symlink_to(target)
    assert pod.purge().returncode == 0
    assert not pod.beside.exists()
    assert (target / "run.json").exists()


def test_the_data_of_another_run_stay(pod: Pod) -> None:
    for other in (pod.root / "state/other", pod.root / "run/other", pod.root / ".podwatch/other"):
        other.mkdir(parents=True)
        (other / "run.json").write_text("{}")
    assert pod.purge().returncode == 0
    for other in (pod.root / "state/other", pod.root / "run/other", pod.root / ".podwatch/other"):
        assert (other / "run.json").exists(), other
    assert not pod.beside.exists()


def test_a_record_that_names_another_run_protects_the_whole_directory(pod: Pod) -> None:
    save_run_record(pod.workspace.probe(), RunRecord("another", Lineage("line")))
    done = pod.purge()
    assert done.returncode == 0
    assert (pod.beside / "quarantine/1/0-checkpoint-20/model.safetensors").exists()
    assert "it belongs to the run another" in done.stdout
    assert not pod.state.exists()


@pytest.mark.parametrize("record", ["", "{", '{"schema_version": 99}'])
def test_without_a_readable_record_podwatch_s_directory_stays(pod: Pod, record: str) -> None:
    (pod.beside / "run.json").write_text(record)
    if not record:
        (pod.beside / "run.json").unlink()
    pod.purge()
    assert (pod.beside / "quarantine/1/0-checkpoint-20/model.safetensors").exists()


def test_the_quarantine_of_a_run_whose_directory_is_inside_this_one_stays(pod: Pod) -> None:
    inner = Workspace(pod.output / "inner")
    inner.output_dir.mkdir()
    save_run_record(inner.probe(), RunRecord("inner", Lineage("line")))
    (inner.inside / "quarantine/4/0-checkpoint-7").mkdir(parents=True)
    (inner.inside / "quarantine/4/0-checkpoint-7/model.bin").write_text("weights")
    (inner.inside / "quarantine/4/index.json").write_text(json.dumps({"steps": {}, "moves": [], "wall": 1.0}))
    (inner.inside / "trash/9.9.9").mkdir(parents=True)
    done = pod.purge()
    assert (inner.inside / "quarantine/4/0-checkpoint-7/model.bin").exists(), done.stdout
    assert (inner.inside / "trash/9.9.9").exists()
    assert not (pod.beside / "quarantine").exists()


def test_entries_that_podwatch_does_not_create_stay_with_their_directory(pod: Pod) -> None:
    (pod.state / "notes.txt").write_text("mine")
    (pod.beside / "quarantine" / "my copy").mkdir()
    done = pod.purge()
    assert (pod.state / "notes.txt").read_text() == "mine"
    assert "1 entry not podwatch's stay, such as notes.txt" in done.stdout
    assert sorted(p.name for p in pod.state.iterdir()) == ["notes.txt"]
    assert (pod.beside / "quarantine" / "my copy").is_dir()


def test_a_state_dir_that_is_no_state_dir_loses_nothing(pod: Pod) -> None:
    """A typing error in state_dir, and a run with the name of somebody's directory."""
    home = pod.root / "home" / "r"
    home.mkdir(parents=True)
    (home / "thesis.tex").write_text("years")
    config = pod.root / "podwatch.toml"
    config.write_text(config.read_text().replace(f"{pod.root}/state", f"{pod.root}/home"))
    pod.purge()
    assert (home / "thesis.tex").read_text() == "years"


@as_root
@pytest.mark.parametrize("place", ["state/r", ".podwatch/outputs/run.json", ".podwatch/outputs", ".podwatch"])
def test_what_belongs_to_another_user_is_left(pod: Pod, place: str) -> None:
    os.chown(pod.root / place, T, T)
    pod.purge("--discard-unstored")
    assert (pod.root / place).exists()
    if place != "state/r":
        assert (pod.beside / "quarantine/1/0-checkpoint-20/model.safetensors").exists()
    else:
        assert (pod.state / "journal.sqlite").exists()


# -- while something runs, and after an interruption


def test_a_podwatch_that_guards_the_run_stops_the_purge(pod: Pod) -> None:
    before = {k: v for k, v in pod.picture().items() if not k.endswith("/lock")}
    with FileLock(pod.state / "lock"):
        refused = pod.purge()
    assert refused.returncode == 75
    assert f"a podwatch guards the run (pid {os.getpid()})" in refused.stderr
    assert {k: v for k, v in pod.picture().items() if not k.endswith("/lock")} == before


def test_the_pid_to_end_is_that_of_the_parent_which_restarts_podwatch(pod: Pod) -> None:
    parent = subprocess.Popen(["sleep", "600"])
    try:
        (pod.root / "run/r/init.pid").write_text(f"{parent.pid}\n")
        with FileLock(pod.state / "lock"):
            listed, refused = pod.podwatch("uninstall"), pod.purge()
        assert f"podwatch guards the run without a service: kill {parent.pid} ends it" in listed.stdout
        assert f"(pid {parent.pid}): kill {parent.pid} ends it" in refused.stderr
    finally:
        parent.kill()
        parent.wait()


def test_a_podwatch_whose_end_ends_training_is_not_said_to_leave_it_running(pod: Pod) -> None:
    """`podwatch run --job`, by the argument of its init."""
    parent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "--job"])
    try:
        (pod.root / "run/r/init.pid").write_text(f"{parent.pid}\n")
        with FileLock(pod.state / "lock"):
            listed, refused = pod.podwatch("uninstall"), pod.purge()
        for said in (listed.stdout, refused.stderr):
            assert f"kill {parent.pid} ends it and training" in said
    finally:
        parent.kill()
        parent.wait()


def test_training_that_runs_stops_the_purge(pod: Pod) -> None:
    """A process whose command is the configured one possibly becomes the run's trainer."""
    (pod.root / "train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(600)\n")
    config = pod.root / "podwatch.toml"
    config.write_text(config.read_text().replace('"train.py"', f'"{pod.root}/train.py"'))
    trainer = subprocess.Popen([sys.executable, str(pod.root / "train.py")], stdout=subprocess.PIPE, cwd=pod.root)
    try:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        before = pod.picture()
        # Another process: one of ours would be no trainer of an operator.
        refused = pod.podwatch("uninstall", "--purge", "--yes", "--discard-unstored", typed="\n")
        assert refused.returncode == 75, refused.stdout + refused.stderr
        assert str(trainer.pid) in refused.stderr
        assert pod.picture() == before
    finally:
        trainer.kill()
        trainer.communicate()


@as_root
def test_an_interrupted_purge_can_be_repeated(pod: Pod) -> None:
    """A file system that is mounted in the way ends it half-way: the record stays, and the second one finishes."""
    place = pod.beside / "quarantine/1/mounted"
    place.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("cannot mount here")
    try:
        half = pod.purge()
    finally:
        moved_to = pod.beside / "trash/purged-quarantine-1/mounted"
        subprocess.run(["umount", str(moved_to if moved_to.exists() else place)], check=True)
    assert half.returncode == 1
    assert "another filesystem is mounted here" in half.stdout
    assert (pod.beside / "run.json").exists()
    assert not (pod.beside / "quarantine/1").exists(), "half a checkpoint has no name of its own"
    done = pod.purge()
    assert done.returncode == 0, done.stdout + done.stderr
    assert not pod.beside.exists()


def test_a_broken_configuration_is_no_reason_to_remove_anything(pod: Pod) -> None:
    (pod.root / "podwatch.toml").write_text("run_id = \n")
    before = pod.picture()
    assert pod.purge().returncode == 78
    listed = pod.podwatch("uninstall")
    assert (listed.returncode, pod.picture()) == (0, before)
    assert "not known: " in listed.stdout
