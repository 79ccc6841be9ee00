"""Only what is reached without a link below its configured root, in the directory that was pinned, is a checkpoint."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.app.own_findings import linked_findings
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.scan import first_link
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.errors import HostError
from podwatch.system.pinned_directories import PinnedTree
from tests.drivers.checkpoints import custom_layout, prime_rl_layout
from tests.support.checkpoints import write_prime_rl_step
from tests.support.clock import ManualClock
from tests.support.other_users import E, T, as_root, enterable, own


class Bench:
    def __init__(self, out: Path, tree: PinnedTree | None = None) -> None:
        self.clock = ManualClock()
        self.catalogue = Catalogue(prime_rl_layout(out), self.clock, settle=5.0, settle_weak=60.0, tree=tree)

    def settle(self) -> dict[int, CheckpointSet]:
        self.catalogue.rescan()
        self.clock.advance(1000)
        return {s.step: s for s in self.catalogue.rescan()}


@pytest.fixture(scope="module")
def reader_of_the_file() -> None:
    """Here each test has a child of its own: it has the rights of the user whose files it reads."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    enterable(tmp_path)
    out = tmp_path / "home" / "outputs"
    write_prime_rl_step(out, 5, "A", ranks=2)
    if os.geteuid() == 0:
        own(tmp_path / "home", T)
    return out


def behind_a_link(place: Path, elsewhere: Path) -> None:
    place.rename(elsewhere)
    place.symlink_to(elsewhere)


def test_checkpoints_behind_a_link_are_none(out: Path, tmp_path: Path) -> None:
    bench = Bench(out)
    assert bench.settle()[5].complete
    behind_a_link(out / "checkpoints", tmp_path / "other")
    assert bench.settle() == {}, "not listed: so not sent, not resumed from and not removed"
    assert bench.catalogue.linked == (out / "checkpoints",)
    assert bench.catalogue.out_of_reach == {5}
    with pytest.raises(HostError):
        bench.catalogue.contents(5)
    (finding,) = linked_findings(bench.catalogue.linked, since=0.0)
    assert "outputs/checkpoints is a symbolic link" in finding.summary
    assert "trainer.checkpoint_dir" in finding.suggestion
    (out / "checkpoints").unlink()
    (tmp_path / "other").rename(out / "checkpoints")
    assert bench.settle()[5].complete
    assert bench.catalogue.linked == ()
    assert bench.catalogue.out_of_reach == frozenset()


@pytest.mark.parametrize("segment", ["step_5", "step_5/trainer"])
def test_a_link_further_down(out: Path, tmp_path: Path, segment: str) -> None:
    place = out / "checkpoints" / segment
    behind_a_link(place, tmp_path / "other")
    bench = Bench(out)
    (found,) = bench.settle().values()
    assert (found.complete, found.unclear) == (False, True), "a start asks before it starts fresh"
    assert f"{place} is a symbolic link" in found.reason
    assert bench.catalogue.problem == ""


@pytest.mark.parametrize("name", ["ckpt_10", "checkpoint-10", "10", "epoch=1-step=10.ckpt", "iter_0000010"])
@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_that_was_moved_and_linked_is_out_of_reach(tmp_path: Path, name: str, there: bool) -> None:
    """Also where the disk that it was moved to is not mounted. A link to another checkpoint here is none."""
    out, kind = tmp_path / "out", CustomLayoutSettings(parts="ckpt_{step}")
    (out / "ckpt_5").mkdir(parents=True)
    (out / "ckpt_5" / "model.bin").write_bytes(b"x")
    (out / "ckpt_7").symlink_to("ckpt_5")
    (out / "Qwen3-8").symlink_to(tmp_path)
    if there:
        (tmp_path / "moved").mkdir()
    (out / name).symlink_to(tmp_path / "moved")
    layout = custom_layout(out, kind)
    catalogue = Catalogue(layout, ManualClock(), settle=5.0, settle_weak=60.0)
    catalogue.rescan()
    assert catalogue.out_of_reach == {10}
    assert catalogue.linked == (out / name,)


def test_a_file_that_was_moved_and_linked_makes_an_unclear_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "ckpt_5").mkdir(parents=True)
    (out / "ckpt_5" / "rng.bin").write_bytes(b"x")
    kind = CustomLayoutSettings(parts="ckpt_{step}", require=("model.bin",))
    clock = ManualClock()
    catalogue = Catalogue(custom_layout(out, kind), clock, settle=5.0, settle_weak=60.0)

    def found() -> CheckpointSet:
        catalogue.rescan()
        clock.advance(10_000)
        (one,) = catalogue.rescan()
        return one

    assert not found().unclear
    (out / "ckpt_5" / "model.bin").symlink_to(tmp_path / "elsewhere.bin")
    assert found().unclear
    assert not found().complete
    (out / "ckpt_5" / "model.bin").unlink()
    (out / "ckpt_5" / "model.bin").write_bytes(b"x")
    assert found().complete, "and again once the file is back"
    (out / "ckpt_5" / "base").symlink_to("/models/base")
    assert found().complete, "a link beside a whole checkpoint does not matter"


def test_links_above_the_root_are_the_operators(out: Path, tmp_path: Path) -> None:
    (tmp_path / "app").symlink_to(out.parent)
    assert Bench(tmp_path / "app" / "outputs").settle()[5].complete
    assert first_link(out / "checkpoints" / "step_5", (out,)) is None


def to_a_link(out: Path) -> None:
    other = out.parents[1] / "of-e" / "outputs"
    write_prime_rl_step(other, 9, "A", ranks=2)
    write_prime_rl_step(other, 5, "A", ranks=2)
    own(other, E)
    out.symlink_to(other)
    os.chown(out, T, T, follow_symlinks=False)


def to_another_owner(out: Path) -> None:
    write_prime_rl_step(out, 9, "A", ranks=2)
    write_prime_rl_step(out, 5, "A", ranks=2)
    own(out, E)


@pytest.mark.parametrize("replace", [to_a_link, to_another_owner])
@as_root
def test_a_replaced_output_directory_holds_nothing_that_may_be_used(out: Path, replace: Callable[[Path], None]) -> None:
    bench = Bench(out, PinnedTree([out], owner=T))
    assert bench.settle()[5].complete
    out.rename(out.with_name("earlier"))
    replace(out)
    sets = bench.settle()
    assert set(sets) == {5}
    assert sets[5].completeness is Completeness.WRITING, "neither used nor removed"
    assert not sets[5].save_id
    assert "find out which user replaced it" in bench.catalogue.problem or "remove the link" in bench.catalogue.problem
    out.rename(out.with_name("of-e"))
    out.with_name("earlier").rename(out)
    assert bench.settle()[5].complete
    assert bench.catalogue.problem == ""


@as_root
def test_one_that_was_never_right_holds_nothing(out: Path) -> None:
    own(out, E)
    bench = Bench(out, PinnedTree([out], owner=T))
    assert bench.settle() == {}
    assert f"belongs to user {E}" in bench.catalogue.problem


@as_root
def test_recreated_by_its_owner_it_is_looked_at_again(out: Path) -> None:
    bench = Bench(out, PinnedTree([out], owner=T))
    assert bench.settle()[5].complete
    out.rename(out.with_name("earlier"))
    write_prime_rl_step(out, 9, "A", ranks=2)
    own(out, T)
    sets = bench.settle()
    assert [s for s in sets if sets[s].complete] == [9]


@as_root
def test_a_file_that_the_user_cannot_read_makes_none_complete(out: Path) -> None:
    """As with one of root's that the user linked: podwatch, which is root, does not read it for that user."""
    bench = Bench(out, PinnedTree([out], owner=T))
    metadata = next(out.rglob(".metadata"))
    metadata.chmod(0o600)
    os.chown(metadata, 0, 0)
    found = bench.settle()[5]
    assert not found.complete
    assert f"Permission denied for user {T}" in found.reason
