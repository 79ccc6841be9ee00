"""The small pieces: quarantine on a bad disk, memory over a reboot, the plan, what counts as free."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.domain.errors import HostError
from podwatch.domain.quarantine_index import QuarantineIndex
from podwatch.domain.run_state import RestartHistory, RunState, WrittenAt
from podwatch.domain.snapshot import GpuSample, GpuState, SensorState, observed, unobserved
from podwatch.recovery import gpus_and_ports_free, quarantine
from podwatch.recovery.start_plan import changed_configs, config_digests
from podwatch.system.own_directories import Workspace
from tests.support.examples import examples

GIB = 1 << 30


def intent_for(paths: list[Path], number: int = 7) -> QuarantineIndex:
    return quarantine.plan(paths, step=10, steps={15: "complete"}, lineage="l", wall=1.0, number=number)


@pytest.fixture
def place(quick_dir: Path) -> Workspace:
    (quick_dir / "out").mkdir()
    workspace = Workspace(quick_dir / "out")
    quarantine.make_spare(workspace)
    return workspace


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "data").write_text(str(path))
    return path


def test_equal_names_from_different_places_do_not_collide(place: Workspace) -> None:
    paths = [make(place.output_dir / kind / "step_15") for kind in ("checkpoints", "broadcasts")]
    assert quarantine.carry_out(place, intent_for(paths)) == 2
    assert not any(p.exists() for p in paths)
    assert quarantine.carry_out(place, intent_for(paths)) == 0, "doing it again changes nothing"
    assert set(quarantine.give_back(place, 7)) == set(paths)
    assert all((p / "data").read_text() == str(p) for p in paths)


def test_nothing_is_overwritten_in_either_direction(place: Workspace) -> None:
    path = make(place.output_dir / "checkpoints" / "step_15")
    intent = intent_for([path])
    quarantine.carry_out(place, intent)
    make(path)
    with pytest.raises(HostError, match="overwrites neither"):
        quarantine.carry_out(place, intent)
    with pytest.raises(HostError, match="exists already"):
        quarantine.give_back(place, 7)
    assert (path / "data").exists()


def test_the_steps_of_an_entry_are_in_order(place: Workspace) -> None:
    path = make(place.output_dir / "checkpoints" / "step_15")
    steps = {5: "complete", 10: "complete", 15: "complete"}
    quarantine.carry_out(place, quarantine.plan([path], step=None, steps=steps, lineage="l", wall=1.0, number=7))
    (entry,) = quarantine.listing(place)
    assert list(entry.to_json()["steps"]) == ["5", "10", "15"]


def test_what_the_index_cannot_name_is_not_moved(place: Workspace) -> None:
    """It could never be returned."""
    odd = place.output_dir / os.fsdecode(b"step_15\xff")
    odd.mkdir()
    with pytest.raises(HostError, match="not UTF-8"):
        quarantine.carry_out(place, intent_for([odd]))
    with pytest.raises(HostError, match=r"moves\.0"):
        quarantine.carry_out(place, replace(intent_for([odd]), moves=((str(odd), "../x"),)))
    assert odd.exists()
    assert quarantine.listing(place) == []


def test_only_what_is_ours_is_moved(place: Workspace, quick_dir: Path) -> None:
    outside = make(quick_dir / "elsewhere" / "step_15")
    with pytest.raises(HostError, match="outside the output directory"):
        quarantine.carry_out(place, intent_for([outside]))
    sly = place.output_dir / ".." / "elsewhere" / "step_15"
    with pytest.raises(HostError, match="outside the output directory"):
        quarantine.carry_out(place, intent_for([sly]))
    assert outside.exists()
    quarantine.carry_out(Workspace(place.output_dir, beside=(quick_dir / "elsewhere",)), intent_for([outside], 8))
    assert not outside.exists()


def test_a_full_disk_has_a_spare_directory_ready(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(place.output_dir / "checkpoints" / "step_15")

    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", no_space)
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert quarantine.carry_out(place, intent_for([path])) == 1
    monkeypatch.undo()
    (entry,) = quarantine.listing(place)
    assert entry.index is not None
    assert entry.index.steps == {15: "complete"}
    assert quarantine.give_back(place, 7) == (path,)


def test_what_is_recorded_survives_a_reboot_in_its_own_time() -> None:
    kept = RunState(
        "r",
        written=WrittenAt("m", "boot", 5_000.0, 1_000_000.0),
        history=RestartHistory(ever_worked=True, streak_count=3, streak_started_at=4_000.0, gave_up_at=4_900.0),
        refused={15: "resumed wrong"},
        gpu_base={0: 7},
        below=15,
    )
    assert kept.here("m", "boot", 5_001.0, 1_000_001.0) == kept
    moved = kept.here("m", "another", 10.0, 1_000_600.0)
    assert moved.history.streak_started_at == pytest.approx(10.0 - 600.0 - 1_000.0)
    assert moved.gpu_base == {}
    assert (moved.refused, moved.below) == ({15: "resumed wrong"}, 15)


def test_config_files_are_found_in_every_spelling(quick_dir: Path) -> None:
    for name in ("a.toml", "b.toml", "c.toml"):
        (quick_dir / name).write_text(name)
    (quick_dir / "big").write_bytes(b"x" * (2 << 20))
    argv = ["./a.toml", "@a.toml", f"--config={quick_dir}/b.toml", "--x=@c.toml", "big", "absent", "x" * 5000, "a\0b"]
    digests = config_digests(argv, quick_dir)
    assert [Path(n).name for n, _ in digests] == ["a.toml", "b.toml", "c.toml"]
    assert changed_configs(None) == ()


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["python", "train.py", "--log_file", "run.txt"], ["train.py"]),
        (["python", "train.py", "--log_file=run.txt", "--config", "a.toml"], ["a.toml", "train.py"]),
        (["python", "train.py", "train.log", "--metrics-out", "run.txt"], ["train.py"]),
        (["sh", "-c", 'python train.py @ a.toml "$@" 2>&1 | tee -a run.txt', "x"], ["a.toml", "train.py"]),
        (["sh", "-c", "cd sub && python train.py --config b.toml > run.txt", "x"], ["sub/b.toml"]),
        (["bash", "-c", "cd $SOMEWHERE; python train.py"], []),
        (["./start.sh", "--lr", "1"], ["a.toml", "start.sh"]),
        (["bash", "start.sh", "run.txt"], ["a.toml", "run.txt", "start.sh"]),
    ],
)
def test_what_training_writes_is_no_configuration(quick_dir: Path, argv: list[str], named: list[str]) -> None:
    """A log that the command names changes for as long as training runs."""
    (quick_dir / "sub").mkdir(exist_ok=True)
    for name in ("a.toml", "train.py", "train.log", "run.txt", "sub/b.toml"):
        (quick_dir / name).write_text(name)
    (quick_dir / "start.sh").write_text("exec rl @ a.toml\n")
    digests = config_digests(argv, quick_dir)
    assert [str(Path(n).relative_to(quick_dir)) for n, _ in digests] == named


MEMORY = st.integers(0, 80 * GIB)


@settings(deadline=None, max_examples=examples(80))
@given(MEMORY, MEMORY, st.booleans())
def test_free_means_at_most_the_margin_above_the_base(used: int, base: int, configured: bool) -> None:
    sample = GpuSample(0, "u", "n", memory_used_bytes=used)
    answer = gpus_and_ports_free.look(
        observed((sample,), 5.0), since=4.0, configured=(0,) if configured else (), base={0: base}, margin=GIB, ports=()
    )
    assert answer.observed
    assert answer.free == (used - base <= GIB)
    assert gpus_and_ports_free.merge_base({0: base}, {0: used})[0] == min(base, used)


def test_what_was_not_seen_is_not_called_free_memory() -> None:
    sample = GpuSample(0, "u", "n", memory_used_bytes=0)
    late = gpus_and_ports_free.look(observed((sample,), 3.0), since=4.0, configured=(), base={}, margin=GIB, ports=())
    assert not late.observed
    blind = gpus_and_ports_free.look(
        unobserved(SensorState.BLIND, 9.0, "hangs"), since=4.0, configured=(), base={}, margin=GIB, ports=()
    )
    assert not blind.observed
    absent = gpus_and_ports_free.look(
        unobserved(SensorState.ABSENT, 9.0, "none"), since=4.0, configured=(), base={}, margin=GIB, ports=()
    )
    assert absent.observed
    lost = GpuSample(1, "u", "n", state=GpuState.LOST)
    gone = gpus_and_ports_free.look(
        observed((sample, lost), 5.0), since=4.0, configured=(1,), base={}, margin=GIB, ports=()
    )
    assert not gone.free
    assert "fell off the bus" in gone.holders[0]
