"""``podwatch check`` and the disk: whether a save fits while the one before must stay, with the numbers."""

from pathlib import Path

from podwatch.cli.check import disk
from podwatch.cli.check.report import Line
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, Completeness, PartState

MB = 1_000_000


def a_set(step: int, size: int) -> CheckpointSet:
    part = PartState("trainer", f"/o/step_{step}", True, True, size)
    return CheckpointSet(step, "x", Completeness.COMPLETE, (part,), size, 9, 1000.0 + step, f"id{step}")


def check(tmp: Path, capacity: int, *sizes: int, command: tuple[str, ...] = ()) -> list[Line]:
    settings = Settings.model_validate(
        {
            "run_id": "r",
            "state_dir": str(tmp / "state"),
            "trainer": {"output_dir": str(tmp / "out"), "command": command},
            "disk": {"capacity": capacity},
        }
    )
    sets = tuple(a_set(n, size) for n, size in enumerate(sizes))
    return list(disk.disk(settings, lambda: sets))[1:]


def test_a_disk_that_holds_one_set_fails_with_the_numbers(tmp_path: Path) -> None:
    (line,) = check(tmp_path, 90 * MB, 47 * MB)
    assert line.level == "fail"
    assert "space for one checkpoint only: a checkpoint is 47 MB, with margin 51.7 MB" in line.text
    (line,) = check(tmp_path, 90 * MB, 30 * MB, 47 * MB)
    assert line.level == "fail", "what lies there may go, and it is not enough"


def test_room_that_has_to_be_made_first_is_a_warning(tmp_path: Path) -> None:
    (line,) = check(tmp_path, 140 * MB, 47 * MB, 47 * MB)
    assert line.level == "warn"
    assert "46 MB are free" in line.text
    (line,) = check(tmp_path, 250 * MB, 47 * MB, 47 * MB)
    assert line.level == "ok"


def test_the_trainers_own_peak(tmp_path: Path) -> None:
    command = ("uv", "run", "rl", "--ckpt.keep-last", "4")
    lines = check(tmp_path, 200 * MB, 47 * MB, 47 * MB, command=command)
    assert [line.level for line in lines] == ["warn", "ok"]
    assert "the trainer keeps 4 checkpoints, so up to 5 exist (235 MB)" in lines[0].text
    assert len(check(tmp_path, 250 * MB, 47 * MB, command=command)) == 1
