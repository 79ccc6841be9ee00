"""A set whose parts lie on several filesystems: set aside, listed, counted, expired and given back; and one from an
overlay's lower layer, which is refused. Real mounts."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.disk.leftovers import quarantine_entries
from podwatch.disk.plan import Removal, RemovalKind, RemovalPlan
from podwatch.disk.remove import Remover
from podwatch.domain.errors import HostError
from podwatch.domain.quarantine_index import QuarantineIndex
from podwatch.journal.journal import Journal
from podwatch.recovery import quarantine
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.mounts import small_mount

pytestmark = pytest.mark.root


def intent_for(paths: list[Path], number: int = 7) -> QuarantineIndex:
    return quarantine.plan(paths, step=10, steps={15: "complete"}, lineage="l", wall=1.0, number=number)


def make(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "data").write_text(str(path))
    (path / "deep").mkdir()
    (path / "deep" / "more").write_bytes(b"x" * 100_000)
    return path


def tree(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[tuple[Workspace, Path]]:
    """output_dir here, checkpoint_dir on a filesystem of its own."""
    with small_mount(tmp_path / "volume", 8_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        (tmp_path / "out").mkdir()
        (tmp_path / "volume" / "ckpt").mkdir()
        yield Workspace(tmp_path / "out", beside=(tmp_path / "volume" / "ckpt",)).probe(), tmp_path / "volume" / "ckpt"


def test_a_set_on_two_filesystems(volumes: tuple[Workspace, Path], tmp_path: Path) -> None:
    place, ckpt = volumes
    paths = [make(place.output_dir / "broadcasts" / "step_15"), make(ckpt / "step_15")]
    before = [tree(p) for p in paths]
    intent = intent_for(paths)
    assert quarantine.carry_out(place, intent) == 2
    assert not any(p.exists() for p in paths)
    assert quarantine.carry_out(place, intent) == 0, "doing it again changes nothing"
    other = tmp_path / "volume" / ".podwatch" / "ckpt" / "user" / "quarantine" / "7"
    assert sorted(p.name for p in other.iterdir()) == ["1-step_15", "index.json"], "beside the root, never in it"
    (entry,) = quarantine.listing(place)
    assert entry.paths == (place.quarantine / "7", other)
    assert quarantine.free_number(place) == 8
    assert set(quarantine.give_back(place, 7)) == set(paths)
    assert [tree(p) for p in paths] == before
    assert not (tmp_path / "volume" / ".podwatch").exists(), "nothing of ours is left"
    assert quarantine.listing(place) == []


def test_a_crash_between_the_moves_is_finished(volumes: tuple[Workspace, Path]) -> None:
    place, ckpt = volumes
    paths = [make(place.output_dir / "broadcasts" / "step_15"), make(ckpt / "step_15")]
    first = intent_for([paths[0]])
    quarantine.carry_out(place, first)  # as far as a killed one came
    assert quarantine.carry_out(place, intent_for(paths)) == 1
    make(paths[1])
    with pytest.raises(HostError, match="overwrites neither"):
        quarantine.carry_out(place, intent_for(paths))


def test_each_filesystem_counts_and_frees_its_own(volumes: tuple[Workspace, Path], tmp_path: Path) -> None:
    place, ckpt = volumes
    quarantine.carry_out(
        place,
        intent_for([make(place.output_dir / "broadcasts" / "step_15"), make(ckpt / "step_15")]),
    )
    entries = quarantine_entries(place, now_wall=1e9, keep_seconds=60.0, verified=-1)
    assert {e.device for e in entries} == {place.output_dir.stat().st_dev, ckpt.stat().st_dev}
    assert all(e.needed and e.step == 15 and e.bytes >= 100_000 for e in entries)
    journal = Journal.open(tmp_path / "journal.sqlite")
    remover = Remover(place, SystemClock(), lambda _: None)
    removals = tuple(Removal(RemovalKind.QUARANTINE, e.bytes, "expired", e.step, e.path) for e in entries)
    plan = RemovalPlan(removals)
    report = remover.carry_out(plan, lambda _: ())
    journal.close()
    assert (report.problems, len(report.done)) == ((), 2)
    assert quarantine.listing(place) == []
    assert not list((tmp_path / "volume").rglob("data"))
    assert not list(tmp_path.rglob("more"))


def test_out_of_an_overlays_lower_layer(tmp_path: Path) -> None:
    """A checkpoint that came with the container's image: the kernel does not rename its directories."""
    with small_mount(tmp_path / "layers", 8_000_000) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        lower, upper, work, merged = (tmp_path / "layers" / n for n in ("lower", "upper", "work", "merged"))
        for directory in (lower, upper, work, merged):
            directory.mkdir()
        make(lower / "out" / "step_15")
        (lower / "out" / "step_15" / "data").chmod(0o640)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
        if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("no overlay here")
        try:
            source = merged / "out" / "step_15"
            before = tree(source)
            with pytest.raises(OSError, match="cross-device"):
                source.rename(merged / "out" / "elsewhere")
            place = Workspace(merged / "out").probe()
            for _ in range(2):  # podwatch tries again, and changes nothing
                with pytest.raises(HostError, match=r"directory of the container's image.*step_15"):
                    quarantine.carry_out(place, intent_for([source]))
                assert tree(source) == before
            copy = source.with_name("copy")
            subprocess.run(["cp", "-a", str(source), str(copy)], check=True)
            shutil.rmtree(source)
            copy.rename(source)  # what the fix says
            assert quarantine.carry_out(place, intent_for([source])) == 1
            assert not source.exists()
            assert tree(place.quarantine / "7" / "0-step_15") == before
            quarantine.give_back(place, 7)
            assert tree(source) == before
        finally:
            subprocess.run(["umount", "-l", str(merged)], check=True)
