"""The catalogue over real files: crash points in a save, rewrites, deletions under the scan, states and reasons."""

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.checkpoints import completeness_check
from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.inspector import INSPECTOR
from podwatch.checkpoints.known_checkpoints import LOOK_AROUND, Catalogue, InspectionUnanswered
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.settle_time import _look_up, is_slow
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness, newest_complete
from podwatch.domain.errors import HostError
from tests.drivers.checkpoints import custom_layout, hf_layout, one_reader, prime_rl_layout
from tests.support.checkpoints import (
    ManualClock,
    finish,
    hf_operations,
    orchestrator_operations,
    prime_rl_operations,
    take,
    torch_zip_bytes,
    write_hf_step,
    write_prime_rl_step,
    write_rollouts,
)

pytestmark = pytest.mark.slow

SETTLE, WEAK = 5.0, 60.0


class Bench:
    def __init__(self, layout: object) -> None:
        self.clock = ManualClock()
        self.catalogue = Catalogue(layout, self.clock, settle=SETTLE, settle_weak=WEAK)  # type: ignore[arg-type]

    def poll(self, seconds: float = 0.0) -> dict[int, CheckpointSet]:
        self.clock.advance(seconds)
        return {s.step: s for s in self.catalogue.rescan()}

    def settle(self, seconds: float = 1000.0) -> dict[int, CheckpointSet]:
        self.poll()
        return self.poll(seconds)


def prime(out: Path) -> Bench:
    return Bench(prime_rl_layout(out))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


# -- crash points ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["A", "B"])
def test_a_save_stopped_after_any_operation_is_never_complete(out: Path, variant: str) -> None:
    """A trainer killed after each file operation of a save: the earlier step stays the newest complete one."""
    total = len(finish(prime_rl_operations(out, 1, variant, ranks=2)))
    with one_reader():
        for count in range(1, total):
            shutil.rmtree(out)
            write_prime_rl_step(out, 5, variant, ranks=2)
            done = take(prime_rl_operations(out, 10, variant, ranks=2), count)
            bench = prime(out)
            sets = bench.settle()
            newest = newest_complete(tuple(sets.values()))
            assert newest is not None
            assert newest.step == 5, f"stopped after {done[-1]}"
            if 10 in sets:
                assert sets[10].completeness in (Completeness.INCOMPLETE, Completeness.WRITING)
                assert sets[10].reason
                assert sets[10].save_id == ""


@pytest.mark.parametrize("variant", ["A", "B"])
def test_a_rewrite_in_place_stopped_after_any_operation_is_never_complete(out: Path, variant: str) -> None:
    """Rolled back, then saving step 10 again over the old one: the stale .metadata must not vouch for it."""
    total = len(finish(prime_rl_operations(out, 10, variant)))
    first_shard = next(
        i for i, name in enumerate(prime_rl_operations(out, 10, variant), 1) if name.startswith("open __0_0")
    )
    for count in range(first_shard, total):
        shutil.rmtree(out)
        write_prime_rl_step(out, 10, variant)
        for path in sorted(out.rglob("*")):
            if path.is_file():
                os.utime(path, (1_700_000_000, 1_700_000_000))
        done = take(prime_rl_operations(out, 10, variant), count)
        assert not prime(out).settle()[10].complete, f"stopped after {done[-1]}"


def test_hf_save_stopped_after_any_operation_is_never_complete(out: Path) -> None:
    total = len(finish(hf_operations(out, 1, shards=2)))
    for count in range(1, total):
        shutil.rmtree(out)
        take(hf_operations(out, 5, shards=2), count)
        sets = Bench(hf_layout(out)).settle()
        assert not sets[5].complete
        assert sets[5].reason


# -- settling -------------------------------------------------------------------------------------------------------


def test_complete_needs_two_polls_and_the_settle_time(out: Path) -> None:
    write_prime_rl_step(out, 5)
    bench = prime(out)
    assert bench.poll()[5].completeness is Completeness.WRITING
    assert bench.poll(SETTLE - 1)[5].completeness is Completeness.WRITING
    done = bench.poll(1.5)[5]
    assert done.complete
    assert done.save_id
    assert done.reason == ""
    assert not bench.catalogue.saving


def test_an_old_set_is_complete_at_the_second_poll_after_a_restart(out: Path) -> None:
    write_prime_rl_step(out, 5)
    bench = prime(out)
    bench.clock.advance(100)
    assert not bench.poll()[5].complete
    assert bench.poll()[5].complete


def test_weak_layouts_wait_longer(out: Path) -> None:
    directory = out / "training_state" / "step_5"
    directory.mkdir(parents=True)
    (directory / "optimizer.pt").write_bytes(torch_zip_bytes({"a": 1}))
    settings = CustomLayoutSettings(parts="training_state/step_{step}", require=("optimizer.pt",))
    bench = Bench(custom_layout(out, settings))
    bench.poll()
    assert not bench.poll(SETTLE + 1)[5].complete
    assert bench.catalogue.saving
    assert bench.poll(WEAK)[5].complete


def test_cut_off_becomes_incomplete_only_after_a_while(out: Path) -> None:
    write_prime_rl_step(out, 5)
    operations = prime_rl_operations(out, 10, "A")
    for name in operations:
        if name.startswith("half __0_0"):
            break
    bench = prime(out)
    bench.poll()
    assert bench.catalogue.saving
    assert bench.poll(10)[10].completeness is Completeness.WRITING
    assert bench.poll(WEAK)[10].completeness is Completeness.WRITING, "ahead of the newest: a slow rank looks like this"
    assert not bench.catalogue.saving
    late = bench.poll(5 * WEAK)[10]
    assert late.completeness is Completeness.INCOMPLETE
    assert ".metadata is missing" in late.reason
    finish(operations)  # it was only slow
    bench.poll()
    assert bench.poll(10)[10].complete


@pytest.mark.parametrize("variant", ["A", "B"])
def test_orchestrator_only_waits_for_the_trainer(out: Path, variant: str) -> None:
    write_prime_rl_step(out, 5, variant)
    own = out / "run_default" if variant == "A" else out
    finish(orchestrator_operations(own / "checkpoints" / "step_10" / "orchestrator", 10, variant))
    bench = prime(out)
    sets = bench.settle(600)
    assert sets[10].completeness is Completeness.WRITING
    assert "waiting for the trainer" in sets[10].reason
    assert not bench.catalogue.saving
    assert bench.poll(3 * 3600)[10].completeness is Completeness.INCOMPLETE


def test_saved_again_after_a_rollback_is_another_save(out: Path) -> None:
    write_prime_rl_step(out, 10)
    bench = prime(out)
    first = bench.settle()[10]
    operations = prime_rl_operations(out, 10)
    seen_writing = False
    for name in operations:
        now = bench.poll()[10]
        if name.startswith(("open __0", "half __0")):
            assert not now.complete
            assert now.save_id == ""
            seen_writing = True
    assert seen_writing
    bench.poll()
    again = bench.poll(10)[10]
    assert again.complete
    assert again.save_id != first.save_id


def test_in_place_rewrite_of_an_old_step_is_seen_at_once(out: Path) -> None:
    """Twenty steps, so step 1 is only looked at by its telltales."""
    for step in range(1, 21):
        write_prime_rl_step(out, step, "B", size=64)
    bench = prime(out)
    assert all(s.complete for s in bench.settle().values())
    for _ in range(3):
        bench.poll(10)
    shard = out / "checkpoints" / "step_1" / "trainer" / "__0_0.distcp"
    shard.write_bytes(b"x" * shard.stat().st_size)
    assert not bench.poll()[1].complete


def test_save_id_survives_a_copy_that_keeps_mtimes(out: Path, tmp_path: Path) -> None:
    write_prime_rl_step(out, 5, "B")
    before = prime(out).settle()[5].save_id
    shutil.copytree(out, tmp_path / "copy")
    assert prime(tmp_path / "copy").settle()[5].save_id == before


def test_by_products_do_not_change_the_save(out: Path) -> None:
    write_prime_rl_step(out, 5, "A", weights=True)
    write_rollouts(out, 5)
    bench = prime(out)
    before = bench.settle()[5]
    shutil.rmtree(out / "weights")
    after = bench.poll(10)[5]
    assert after.complete
    assert after.save_id == before.save_id
    assert after.size_bytes < before.size_bytes


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("checkpoints/step_5/trainer/__0_0.distcp", "requires"),
        ("checkpoints/step_5/trainer/.metadata", ".metadata is damaged"),
        ("run_default/checkpoints/step_5/orchestrator/progress.pt", "progress.pt"),
        ("run_default/broadcasts/step_5/model.safetensors", "model.safetensors"),
    ],
)
def test_truncated_files_make_a_set_damaged(out: Path, where: str, reason: str) -> None:
    write_prime_rl_step(out, 5)
    path = out / where
    stamp = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[:-5])
    os.utime(path, ns=(stamp, stamp))
    bench = prime(out)
    found = bench.settle()[5]
    assert found.completeness is Completeness.DAMAGED
    assert reason in found.reason
    assert [p.name for p in found.parts if p.required and not p.complete] == [found.reason.split(":")[0]]
    assert bench.catalogue.verify(5)


@pytest.mark.parametrize(
    "where",
    [
        "checkpoints/step_5/trainer/__0_0.distcp",
        "checkpoints/step_5/trainer/.metadata",
        "run_default/checkpoints/step_5/orchestrator/progress.pt",
        "run_default/broadcasts/step_5/STABLE",
    ],
)
def test_missing_files_make_a_set_incomplete(out: Path, where: str) -> None:
    write_prime_rl_step(out, 5)
    (out / where).unlink()
    found = prime(out).settle(10_000)[5]
    assert found.completeness is Completeness.INCOMPLETE
    assert found.reason


def test_verify_finds_what_sizes_cannot(out: Path) -> None:
    write_prime_rl_step(out, 5)
    bench = prime(out)
    assert bench.settle()[5].complete
    assert bench.catalogue.verify(5) == ()
    shard = out / "checkpoints/step_5/trainer/__0_0.distcp"
    status = shard.stat()
    with shard.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(b"\0" * (status.st_size - status.st_size // 2))
    os.utime(shard, ns=(status.st_mtime_ns, status.st_mtime_ns))
    assert "records that are not written" in bench.catalogue.verify(5)[0]


def test_an_inspection_without_an_answer_is_no_damage(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prime_rl_step(out, 5)
    bench = prime(out)
    assert bench.settle()[5].complete

    def no_answer(*_: object) -> bytes:
        raise TimeoutError

    with monkeypatch.context() as patch:
        patch.setattr(INSPECTOR, "_exchange", no_answer)
        with pytest.raises(InspectionUnanswered, match="took longer"):
            bench.catalogue.verify(5)
    assert bench.catalogue.verify(5) == ()


# -- contents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_a_set_rewritten_where_no_telltale_shows_it_is_not_resumed_from(out: Path, whole: bool) -> None:
    """Neither its first shard nor its newest file, no name: only the look at each file before a resume sees it."""
    for step in range(0, 70, 5):
        write_prime_rl_step(out, step, ranks=2)
    for path in sorted(out.rglob("*")):
        os.utime(path, (1_700_000_000, 1_700_000_000))
    bench = prime(out)
    bench.poll()
    assert bench.poll(LOOK_AROUND)[5].complete
    assert bench.catalogue.verify(5) == ()

    shard = out / "checkpoints" / "step_5" / "trainer" / "__1_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data if whole else data[:-1])
    os.utime(shard, (1_600_000_000, 1_600_000_000))
    assert bench.poll(1.0)[5].complete, "this is the limit that docs/checkpoints.md tells of"
    assert bench.catalogue.verify(10) == ()
    problems = bench.catalogue.verify(5)
    assert problems[-1] == "changed since it was found complete"
    assert (len(problems) == 1) is whole
    assert not bench.poll()[5].complete, "it is looked at anew from now on"
    assert bench.poll(1000.0)[5].complete is whole


def test_contents_are_what_travels(out: Path) -> None:
    write_prime_rl_step(out, 5, "A", weights=True)
    trainer = out / "checkpoints/step_5/trainer"
    (trainer / "__7_0.distcp").write_bytes(b"left from a larger world")
    (trainer / ".tmpAb12Cd").write_bytes(b"killed writer")
    (trainer / "inside").symlink_to("__0_0.distcp")
    (trainer / "outside").symlink_to("/etc/passwd")
    (trainer / "up").symlink_to("../../../secret")
    os.utime(trainer / "__7_0.distcp", (1, 1))
    bench = prime(out)
    assert bench.settle()[5].complete
    contents = bench.catalogue.contents(5)
    assert contents.set.complete
    assert {(f.part, f.path) for f in contents.files} == {
        ("trainer", ".metadata"),
        ("trainer", "__0_0.distcp"),
        ("orchestrator", "progress.pt"),
        ("orchestrator", "buffer/rollout_buffer.jsonl"),
        ("broadcast", "model.safetensors"),
        ("broadcast", "config.json"),
        ("broadcast", "STABLE"),
    }
    assert [(s.path, s.target) for s in contents.symlinks] == [("inside", "__0_0.distcp")]
    assert {p.part.name for p in contents.parts if p.present} >= {"trainer", "orchestrator", "broadcast", "weights"}
    assert contents.world_size == 1
    (out / "run_default/checkpoints/step_5/orchestrator/progress.pt").touch()
    changed = bench.catalogue.contents(5)
    assert not changed.set.complete
    assert "changed" in changed.set.reason


def test_contents_of_an_absent_step(out: Path) -> None:
    with pytest.raises(HostError, match="checkpoint of step 7 not found"):
        prime(out).catalogue.contents(7)


# -- the world moves under the scan -----------------------------------------------------------------------------------


def test_directories_vanish_and_come_back_during_rescans(out: Path) -> None:
    bench = prime(out)
    ending = threading.Event()

    def churn() -> None:
        step = 0
        while not ending.is_set():
            step += 1
            write_prime_rl_step(out, step % 3, "B", size=64)
            shutil.rmtree(out / "checkpoints" / f"step_{step % 3}")
            (out / "checkpoints").rename(out / "elsewhere")
            (out / "elsewhere").rename(out / "checkpoints")

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(60):
            bench.poll(1)
            for step in tuple(bench.catalogue.sets)[:1]:
                try:
                    bench.catalogue.contents(step.step)
                    bench.catalogue.verify(step.step)
                except HostError:
                    pass
    finally:
        ending.set()
        writer.join()


def test_output_directory_that_does_not_exist_yet(out: Path) -> None:
    bench = prime(out)
    assert bench.poll() == {}
    write_prime_rl_step(out, 5, "B")
    assert 5 in bench.poll()
    shutil.rmtree(out)
    assert bench.poll() == {}


def test_foreign_names_are_ignored(out: Path) -> None:
    write_prime_rl_step(out, 5, "B")
    root = out / "checkpoints"
    for name in ("step_5.bad", "step_6.tmp", "step_007", "step_-1", "step_", "tmp_step_8", "step_9_x"):
        shutil.copytree(root / "step_5", root / name)
    (root / "step_latest").symlink_to("step_5")
    (root / "step_12").symlink_to("step_5")
    (root / "step_13").write_text("a file")
    assert set(prime(out).settle()) == {5}


def test_a_symlinked_part_is_not_followed(out: Path, tmp_path: Path) -> None:
    write_prime_rl_step(out, 5, "B")
    trainer = out / "checkpoints/step_5/trainer"
    trainer.rename(tmp_path / "away")
    trainer.symlink_to(tmp_path / "away")
    assert not prime(out).settle()[5].complete


def test_what_cannot_be_read_keeps_the_last_sets(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prime_rl_step(out, 5, "B")
    bench = prime(out)
    assert bench.settle()[5].complete
    real = os.scandir

    def denied(path: object = ".") -> object:
        if str(path).endswith("checkpoints"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", denied)
    assert bench.poll(LOOK_AROUND)[5].complete
    assert "Permission denied" in bench.catalogue.problem
    assert bench.catalogue.unlisted == bench.catalogue.problem, "a choice must not rest on the list of before"
    monkeypatch.undo()
    bench.poll()
    assert (bench.catalogue.problem, bench.catalogue.unlisted) == ("", "")


def test_an_unreadable_set_is_never_called_incomplete(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_prime_rl_step(out, 5, "B")
    real = os.scandir

    def broken(path: object = ".") -> object:
        if str(path).endswith("trainer"):
            raise OSError(5, "Input/output error", str(path))
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", broken)
    bench = prime(out)
    found = bench.settle(10**6)[5]
    assert found.completeness is Completeness.WRITING
    assert "Input/output error" in found.reason


def test_a_save_without_an_answer_is_not_called_damaged_by_what_is_not_listed(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system with errors lists less than there is, and its files give no answer."""
    write_prime_rl_step(out, 5, "B")
    bench = prime(out)
    assert bench.settle()[5].complete
    lost = next(path for path in (out / "checkpoints/step_5").rglob("*") if path.is_file())
    lost.unlink()
    real = Layout.judge

    def unanswered(self: Layout, *given: object) -> Inspection:
        judged = real(self, *given)  # type: ignore[arg-type]
        return replace(judged, outcome=InspectionOutcome.UNKNOWN, reason="Input/output error")

    monkeypatch.setattr(Layout, "judge", unanswered)
    found = bench.settle(10**6)[5]
    assert (found.completeness, found.unanswered > 0) == (Completeness.WRITING, True)
    monkeypatch.undo()
    assert bench.settle(10**6)[5].completeness is Completeness.DAMAGED, "once it has an answer"


# -- cost -----------------------------------------------------------------------------------------------------------


def test_unchanged_sets_are_not_judged_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 30):
        write_prime_rl_step(out, step, "B", size=64)
    bench = prime(out)
    bench.settle()
    looked: list[object] = []
    real = completeness_check.scan_part
    monkeypatch.setattr(
        completeness_check, "scan_part", lambda part, roots: (looked.append(part), real(part, roots))[1]
    )
    monkeypatch.setattr(Layout, "judge", lambda *_: pytest.fail("judged again"))
    os.utime(out)  # something may have changed
    bench.poll(10)
    assert 0 < len(looked) <= 12 * 5, "only the newest four and eight in turn are looked at file by file"


def test_hf_rotation_and_watch_dirs(out: Path) -> None:
    write_hf_step(out, 5)
    bench = Bench(hf_layout(out))
    assert bench.settle()[5].complete
    take(hf_operations(out, 10), 5)
    bench.poll()
    assert out / "checkpoint-10" in bench.catalogue.watch_dirs()
    assert out / "checkpoint-5" not in bench.catalogue.watch_dirs()
    shutil.rmtree(out / "checkpoint-5")
    assert set(bench.poll()) == {10}


def test_network_filesystems_are_known_by_their_type(tmp_path: Path) -> None:
    info = tmp_path / "mountinfo"
    info.write_text(
        "22 1 0:50 / /data rw - nfs4 server:/x rw\n23 1 0:51 / /f rw - fuse.sshfs x rw\n"
        "24 1 0:52 / / rw - ext4 /dev/a rw\n"
    )
    assert is_slow(_look_up(os.makedev(0, 50), info))
    assert is_slow(_look_up(os.makedev(0, 51), info))
    assert _look_up(os.makedev(0, 52), info) == "ext4"
    assert not is_slow("ext4")
    assert not is_slow(_look_up(os.makedev(0, 53), info))


# -- saves that are rejected ------------------------------------------------------------------------------------------
