"""A whole save counts at once when its writers were seen to end, or an earlier podwatch knew it; half a one never."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.checkpoints import known_checkpoints as catalogues
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.checkpoints.settle_time import kind_of
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from tests.drivers.checkpoints import custom_layout, hf_layout, one_reader, prime_rl_layout
from tests.support.checkpoints import (
    ManualClock,
    finish,
    hf_operations,
    prime_rl_operations,
    take,
    torch_zip_bytes,
    write_hf_step,
    write_prime_rl_step,
)


def records(out: Path, place: str = "records") -> CheckpointRecords:
    """As a new podwatch reads them."""
    return CheckpointRecords(RecordFiles(out.parent / place), boot_id="boot")


def look(
    layout: Layout, clock: ManualClock, known: CheckpointRecords | None = None, *, times: int = 2, ended: bool = False
) -> CheckpointSet:
    """The newest set as a new podwatch sees it after so many looks, with no time between them."""
    found = Catalogue(
        layout,
        clock,
        settle=5.0,
        settle_weak=60.0,
        settle_tracker=15.0,
        records=known,
    )
    for _ in range(times):
        found.rescan(writers_ended=ended)
    return found.sets[-1]  # fmt: skip


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def make_hf(out: Path) -> Layout:
    write_hf_step(out, 10)
    return hf_layout(out)


def make_prime_rl(out: Path) -> Layout:
    write_prime_rl_step(out, 10)
    return prime_rl_layout(out)


def make_custom(out: Path) -> Layout:
    (out / "ckpt_10").mkdir(parents=True)
    for name in ("model.bin", "optimizer.bin"):
        (out / "ckpt_10" / name).write_bytes(b"weights of " + name.encode())
    return custom_layout(out, CustomLayoutSettings(parts="ckpt_{step}", require=("model.bin",)))


@pytest.mark.parametrize("make", [make_hf, make_prime_rl, make_custom])
def test_a_save_of_a_trainer_that_was_seen_to_end_needs_no_settle_time(out: Path, make: Any) -> None:
    layout, clock = make(out), ManualClock()
    waiting = look(layout, clock)
    assert (waiting.completeness, waiting.save_id) == (Completeness.WRITING, "")
    assert waiting.settles_in is not None
    assert 0 < waiting.settles_in <= 60
    assert not look(layout, clock, times=1, ended=True).complete, "two equal looks"
    done = look(layout, clock, ended=True)
    assert (done.complete, done.settles_in) == (True, None)


@pytest.mark.parametrize("make", [make_hf, make_prime_rl, make_custom])
def test_what_an_earlier_podwatch_knew_is_known(out: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container restarts on a network volume: what was saved in its last 15 minutes was not believed."""
    monkeypatch.setattr(catalogues, "slow_to_show", lambda _: True)
    layout, clock = make(out), ManualClock()
    first = Catalogue(layout, clock, settle=5.0, settle_weak=60.0, records=records(out))
    first.rescan()
    clock.advance(200.0)
    first.rescan()
    assert first.sets[-1].complete
    first.rescan()
    assert look(layout, clock, records(out)).complete
    assert not look(layout, clock).complete, "nothing is known of it: it is observed for the settle time"
    file = next(p for p in sorted(out.rglob("*")) if p.is_file() and p.stat().st_size > 8)
    file.write_bytes(file.read_bytes())
    changed = look(layout, clock, records(out))
    assert not changed.complete, "another save by its times"


@pytest.mark.parametrize("make", [make_hf, make_prime_rl, make_custom])
def test_what_was_said_of_ended_writers_holds_for_the_same_files(out: Path, make: Any) -> None:
    """The rescan of the loop comes between those of a restart, and says nothing of the writers."""
    found = Catalogue(make(out), ManualClock(), settle=5.0, settle_weak=60.0, settle_tracker=15.0)
    found.rescan(writers_ended=True)
    assert not found.sets[-1].complete
    for _ in range(3):
        found.rescan(list_again=True)
        assert found.sets[-1].complete
    file = next(p for p in sorted(out.rglob("*")) if p.is_file() and p.stat().st_size > 8)
    os.utime(file, ns=(1, time.time_ns()))
    found.rescan(list_again=True)
    assert found.rescan(list_again=True)[-1].settles_in is not None, "somebody writes again"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["look", "said", "added", "other save", "other form", "later"]), max_size=10))
def test_no_rescan_takes_a_settled_save_back(tmp_path_factory: pytest.TempPathFactory, events: list[str]) -> None:
    out, clock = tmp_path_factory.mktemp("out"), ManualClock()
    for step in (5, 10):
        write_hf_step(out, step)
    found = Catalogue(hf_layout(out), clock, settle=5.0, settle_weak=60.0, settle_tracker=15.0)
    for _ in range(2):
        found.rescan(writers_ended=True)
    with one_reader():
        for number, event in enumerate(events):
            if event == "added":
                (out / "checkpoint-10" / f"evaluation_{number}.txt").write_text("0.5")
            if event == "other save":
                write_hf_step(out, 100 + number)
            if event == "other form":
                write_hf_step(out, 200 + number)
                (out / f"checkpoint-{200 + number}" / "scaler.pt").write_bytes(torch_zip_bytes({"scale": 1}))
            if event == "later":
                clock.advance(700.0)
            found.rescan(writers_ended=event == "said", list_again=True)
            states = {s.step: s.completeness for s in found.sets}
            assert (states[5], states[10]) == (Completeness.COMPLETE, Completeness.COMPLETE), (event, states)


def test_ended_writers_prove_nothing_on_a_network_volume(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This client may show what another one wrote seconds later."""
    monkeypatch.setattr(catalogues, "slow_to_show", lambda _: True)
    assert not look(make_hf(out), ManualClock(), ended=True).complete


@pytest.mark.parametrize("variant", ["A", "B"])
def test_a_save_that_was_cut_off_anywhere_is_never_complete(out: Path, variant: str) -> None:
    """The settle time is no protection against a killed writer: the layout's rule and the structure are."""
    total = len(finish(prime_rl_operations(out, 1, variant, ranks=2)))
    with one_reader():
        for count in range(1, total):
            shutil.rmtree(out)
            done = take(prime_rl_operations(out, 10, variant, ranks=2), count)
            sets = [s for s in [look_or_none(prime_rl_layout(out))] if s is not None]
            assert not any(s.complete for s in sets), f"stopped after {done[-1]}"


def test_an_hf_save_that_was_cut_off_anywhere_is_never_complete(out: Path) -> None:
    total = len(finish(hf_operations(out, 1, shards=2)))
    with one_reader():
        for count in range(1, total):
            shutil.rmtree(out)
            done = take(hf_operations(out, 10, shards=2), count)
            found = look_or_none(hf_layout(out))
            assert found is None or not found.complete, f"stopped after {done[-1]}"


def look_or_none(layout: Layout) -> CheckpointSet | None:
    found = Catalogue(layout, ManualClock(), settle=5.0, settle_weak=60.0, settle_tracker=15.0)
    for _ in range(2):
        found.rescan(writers_ended=True)
    return found.sets[-1] if found.sets else None


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[Path]:
    """A real FUSE mount of a directory."""
    if shutil.which("bindfs") is None or os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root, /dev/fuse and bindfs: no FUSE mount can be made here")
    below, mount = tmp_path / "below", tmp_path / "mount"
    below.mkdir()
    mount.mkdir()
    if subprocess.run(["bindfs", str(below), str(mount)], check=False).returncode != 0:
        pytest.skip("this machine refuses a FUSE mount")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_known_save_on_a_real_fuse_mount_is_believed_after_a_restart(fuse: Path) -> None:
    out = fuse / "outputs"
    layout, clock = make_hf(out), ManualClock()
    assert kind_of(out).startswith("fuse")
    first = Catalogue(layout, clock, settle=5.0, settle_weak=60.0, records=records(out))
    first.rescan()
    clock.advance(200.0)
    first.rescan()
    first.rescan()
    assert first.sets[-1].complete
    assert look(layout, clock, records(out)).complete
    unknown = look(layout, clock)
    assert unknown.settles_in is not None
    assert unknown.settles_in <= 30, "the settle time, not a quarter of an hour"
