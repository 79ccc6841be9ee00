"""Lightning: where the step comes from, copies and links called last, versions, directories, the command."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.drivers.checkpoints import (
    ConfigurationError,
    Layout,
    SaveEnd,
    catalogue_of,
    open_layout,
    recognised_as,
    resume_argv,
)
from tests.support.checkpoints import ManualClock, torch_zip_bytes
from tests.support.golden import GOLDENS
from tests.support.layout_checks import relative, verdict
from tests.support.layout_makers import lightning as maker
from tests.support.layout_makers import run

GOLDEN = Path(__file__).parents[1] / "golden"


def layout_at(out: Path, *command: str, **options: Path) -> Layout:
    return open_layout("lightning", out, command, **options)


def put(path: Path, step: int, age: float = 0, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(maker.content(step, **options))  # type: ignore[arg-type]
    os.utime(path, (1_800_000_000 - age,) * 2)
    return path


@pytest.mark.parametrize("name", ["lightning", "lightning-directory"])
def test_what_lightning_itself_wrote(name: str, tmp_path: Path) -> None:
    next(g for g in GOLDENS if g.name == name).copy(tmp_path / "out")
    layout = layout_at(tmp_path / "out")
    assert set(layout.steps()) == {2, 4}
    for step in (2, 4):
        found = verdict(layout, step)
        assert found.whole, found.reason


def test_the_step_is_the_one_inside(tmp_path: Path) -> None:
    """Templates hide it, and a program may log a metric of its own called step."""
    put(tmp_path / "best-val_loss=0.12.ckpt", 30)
    put(tmp_path / "epoch=0-step=3.ckpt", 40)
    put(tmp_path / "hpc_ckpt_2.ckpt", 50)
    layout = layout_at(tmp_path)
    assert set(layout.steps()) == {30, 40, 50}
    assert layout.steps()[40][0].names == ("epoch=0-step=3.ckpt",)
    put(tmp_path / "hpc_ckpt_2.ckpt", 60, age=1)
    assert set(layout.steps()) == {30, 40, 60}


def test_a_file_without_a_step_in_its_name_is_found_once_it_can_be_read(tmp_path: Path) -> None:
    """It was cut off by a kill and is written again in place: nothing changes in the directory above it."""
    directory = tmp_path / "lightning_logs" / "version_0" / "checkpoints"
    put(directory / "epoch=0-step=10.ckpt", 10)
    hidden = directory / "hidden.ckpt"
    hidden.write_bytes(maker.content(20)[:-10])
    for path in (hidden, *hidden.parents[:4]):
        os.utime(path, (1_600_000_000,) * 2)
    clock = ManualClock()
    catalogue = catalogue_of(layout_at(tmp_path), clock, settle=5.0, settle_weak=60.0)
    for _ in range(3):
        assert [s.step for s in catalogue.rescan()] == [10]
        clock.advance(100)
    hidden.write_bytes(maker.content(20))
    assert [s.step for s in catalogue.rescan()] == [10, 20]


def test_a_growing_file_is_told_by_its_name_only(tmp_path: Path) -> None:
    data = maker.content(20)
    (tmp_path / "epoch=1-step=20.ckpt").write_bytes(data[:-10])
    (tmp_path / "hidden.ckpt").write_bytes(data[:-10])
    layout = layout_at(tmp_path)
    assert set(layout.steps()) == {20}
    assert verdict(layout, 20).damaged


def test_last_as_a_copy(tmp_path: Path) -> None:
    """It counts where no other file has its step, and goes and is set aside with it."""
    put(tmp_path / "epoch=0-step=10.ckpt", 10)
    put(tmp_path / "last.ckpt", 10)
    layout = layout_at(tmp_path)
    assert layout.steps()[10][0].names == ("epoch=0-step=10.ckpt",)
    assert relative(layout.step_paths(10), tmp_path) == {"epoch=0-step=10.ckpt", "last.ckpt"}
    put(tmp_path / "last.ckpt", 20, age=1)
    assert layout.steps()[20][0].names == ("last.ckpt",)
    assert relative(layout.ahead_of(10), tmp_path) == {"last.ckpt"}


def test_last_as_a_link(tmp_path: Path) -> None:
    for step in (10, 20):
        put(tmp_path / f"epoch=0-step={step}.ckpt", step)
    link = tmp_path / "last.ckpt"
    link.symlink_to("epoch=0-step=20.ckpt")
    layout = layout_at(tmp_path)
    assert layout.pinned() == {20: "last.ckpt"}
    (tracker,) = layout.trackers(10)
    assert (tracker.path, tracker.target) == (link, "epoch=0-step=10.ckpt")
    assert layout.trackers(None) == ()
    assert relative(layout.ahead_of(10), tmp_path) == {"epoch=0-step=20.ckpt"}
    assert link in layout.ahead_of(None)
    for target in ("gone.ckpt", "/etc/passwd", "../../escape.ckpt"):
        link.unlink()
        link.symlink_to(target)
        assert set(layout.steps()) == {10, 20}
        assert layout.pinned() == {}
        assert link not in layout.step_paths(20)


def test_the_best_one_is_pinned(tmp_path: Path) -> None:
    put(tmp_path / "epoch=0-step=10.ckpt", 10)
    put(tmp_path / "epoch=0-step=20.ckpt", 20, best="/elsewhere/epoch=0-step=10.ckpt")
    assert layout_at(tmp_path).pinned() == {10: "best_model_path"}


def test_every_start_makes_a_version(tmp_path: Path) -> None:
    """The newer file of a step counts; the older one goes with it."""
    for version, age in ((0, 100), (1, 0)):
        put(tmp_path / f"lightning_logs/version_{version}/checkpoints/epoch=0-step=10.ckpt", 10, age)
    put(tmp_path / "lightning_logs/version_0/checkpoints/epoch=0-step=20.ckpt", 20)
    layout = layout_at(tmp_path)
    assert layout.steps()[10][0].path.parts[-2] == "version_1"
    assert len(layout.step_paths(10)) == 2
    assert layout.steps()[20][0].path.parts[-2] == "version_0"
    assert layout.part_dir("checkpoint", 20).parts[-2] == "version_0"
    assert layout.part_dir("checkpoint", 99) == tmp_path / "checkpoints"
    assert len(layout.watch_roots()) >= 2
    elsewhere = layout_at(tmp_path / "none", checkpoint_dir=tmp_path / "lightning_logs/version_1/checkpoints")
    assert set(elsewhere.steps()) == {10}


def test_the_place_of_the_next_version_is_watched(tmp_path: Path) -> None:
    """A listing is only repeated when one of these directories changed."""
    layout = layout_at(tmp_path)
    logs = tmp_path / "lightning_logs"
    assert tmp_path in layout.watch_roots()
    put(logs / "version_0/checkpoints/epoch=0-step=10.ckpt", 10)
    (logs / "version_1").mkdir()
    os.utime(logs / "version_1", (2_000_000_000,) * 2)
    assert {logs, logs / "version_0/checkpoints", logs / "version_1"} <= set(layout.watch_roots())
    save = tmp_path / "epoch=0-step=20.ckpt"  # a directory, newer than any other: no version begins in it
    put(save / "meta.pt", 20)
    (save / "checkpoint").mkdir()
    os.utime(save, (2_100_000_000,) * 2)
    assert logs / "version_1" in layout.watch_roots()
    assert save not in layout.watch_roots()
    alone = layout_at(tmp_path, checkpoint_dir=logs / "version_0/checkpoints")
    assert alone.watch_roots() == (logs / "version_0/checkpoints",)


def test_weights_only_is_no_resume_point(tmp_path: Path) -> None:
    put(tmp_path / "epoch=0-step=10.ckpt", 10, weights_only=True)
    found = verdict(layout_at(tmp_path), 10)
    assert not found.whole
    assert "weights only" in found.reason


def test_the_old_format_needs_the_long_wait(tmp_path: Path) -> None:
    legacy = (GOLDEN / "legacy.pt").read_bytes()
    (tmp_path / "epoch=0-step=10.ckpt").write_bytes(legacy)
    found = verdict(layout_at(tmp_path), 10)
    assert (found.whole, found.ends) == (True, SaveEnd.NONE)


def test_a_directory_that_was_saved_again_and_cut_off(tmp_path: Path) -> None:
    """meta.pt of the save before is older than the DCP index of this one."""
    run(maker.fsdp(tmp_path, 10))
    layout = layout_at(tmp_path)
    assert verdict(layout, 10).ends is SaveEnd.COMMIT
    meta = tmp_path / "checkpoints/epoch=0-step=10.ckpt/meta.pt"
    os.utime(meta, (1_700_000_000,) * 2)
    assert "newer than meta.pt" in verdict(layout, 10).reason
    meta.write_bytes(torch_zip_bytes({"global_step": 12}))
    assert set(layout.steps()) == {12}


def test_deepspeed_directories_bind_the_world_size(tmp_path: Path) -> None:
    run(maker.deepspeed(tmp_path, 10))
    layout = layout_at(tmp_path)
    assert verdict(layout, 10).world_size == 2
    assert not layout.reshards
    (tmp_path / "checkpoints/epoch=0-step=10.ckpt/latest").write_text("another")
    assert "latest names 'another'" in verdict(layout, 10).reason


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "main.py", "fit", "--config", "c.yaml"), ("--ckpt_path", "CKPT")),
        (("python", "main.py", "--ckpt_path", "old.ckpt"), ("--ckpt_path", "CKPT")),
        (("python", "src/train.py", "trainer.max_epochs=3"), ("ckpt_path='CKPT'",)),
        (("python", "src/train.py", "ckpt_path=old.ckpt"), ("ckpt_path='CKPT'",)),
    ],
)
def test_the_command(tmp_path: Path, command: Sequence[str], expected: Sequence[str]) -> None:
    run(maker.operations(tmp_path, 10))
    file = str(tmp_path / "checkpoints" / "epoch=0-step=10.ckpt")
    argv = resume_argv(layout_at(tmp_path), command, 10)
    kept = tuple(a for a in command if "old.ckpt" not in a and a != "--ckpt_path")
    assert argv == (*kept, *(e.replace("CKPT", file) for e in expected))
    assert resume_argv(layout_at(tmp_path), command, None) == kept


def test_a_script_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Lightning is a library"):
        resume_argv(layout_at(tmp_path), ("python", "train.py"), 10)


def test_target_and_finish(tmp_path: Path) -> None:
    layout = layout_at(tmp_path)
    assert layout.target_step(("python", "main.py", "fit", "--trainer.max_steps=500")) == 500
    assert layout.target_step(("python", "train.py", "trainer.max_steps=70")) == 70
    assert layout.target_step(("python", "train.py", "trainer.max_steps=-1")) is None
    assert layout.finish_lines == ("`Trainer.fit` stopped:",)


def test_recognised_by_its_logs(tmp_path: Path) -> None:
    assert recognised_as("lightning", tmp_path) is None
    (tmp_path / "lightning_logs").mkdir()
    found = recognised_as("lightning", tmp_path)
    assert found is not None
    assert not found.certain
