"""The catalogue on what cannot be believed at once: reboots, holes, old formats, no marker, wild writers, and the cost
of looking when nothing happens."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from podwatch.checkpoints.formats.torch_zip import LEGACY_MAGIC
from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.known_checkpoints import LOOK_AROUND, Catalogue
from podwatch.checkpoints.records import CheckpointRecords, RecordFiles
from podwatch.config.settings import CustomLayoutSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness, HeldAs
from podwatch.domain.errors import HostError
from podwatch.domain.run import Lineage
from podwatch.recovery.choose import choose
from tests.drivers.checkpoints import Layout, custom_layout, prime_rl_layout
from tests.support.checkpoints import ManualClock, torch_zip_bytes, write_prime_rl_step

pytestmark = pytest.mark.slow

WEAK = 60.0


class Bench:
    def __init__(self, layout: Any, records: CheckpointRecords | None = None) -> None:
        self.clock = ManualClock()
        self.catalogue = Catalogue(
            layout, self.clock, settle=5.0, settle_weak=WEAK, settle_tracker=15.0, records=records
        )

    def poll(self, seconds: float = 0.0) -> dict[int, CheckpointSet]:
        self.clock.advance(seconds)
        return {s.step: s for s in self.catalogue.rescan()}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


# -- nothing changed ------------------------------------------------------------------------------------------------

_listed: list[str] | None = None
_root = ""


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _listed is None or event not in ("os.scandir", "os.listdir", "open"):
        return
    # Only what concerns the outputs: the interpreter may open a source file at any time (a warning's line).
    # Something opened by its descriptor has no path here, and counts.
    if isinstance(arguments[0], int) or str(arguments[0]).startswith(_root):
        _listed.append(f"{event} {arguments[0]}")


@pytest.fixture
def listening(out: Path) -> Iterator[Callable[[], list[str]]]:
    """Everything that is listed or opened in the outputs, by the interpreter's own audit events."""
    global _listed, _root
    if not getattr(_listen, "installed", False):
        sys.addaudithook(_listen)
        _listen.installed = True  # type: ignore[attr-defined]

    _root = str(out)

    def begin() -> list[str]:
        global _listed
        _listed = []
        return _listed

    yield begin
    _listed = None


def test_nothing_changed_and_nothing_open_lists_no_directory(
    out: Path, listening: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 41):
        write_prime_rl_step(out, step, "A", size=64)
    bench = Bench(prime_rl_layout(out))
    bench.poll()
    assert all(s.complete for s in bench.poll(1000).values())
    bench.poll(10)
    stats: list[object] = []
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda *a, **k: (stats.append(a), real(*a, **k))[1])
    monkeypatch.setattr(Layout, "steps", lambda _: pytest.fail("the steps were listed"))
    seen = listening()
    for _ in range(20):
        bench.poll(10)
    assert seen == []
    assert len(stats) <= 20 * (40 * 9 + 5), "telltales only"
    monkeypatch.undo()
    write_prime_rl_step(out, 41, "A", size=64)
    assert 41 in bench.poll(10)
    assert any("scandir" in line for line in seen)


def test_the_directories_are_listed_again_after_a_while(out: Path, listening: Callable[[], list[str]]) -> None:
    write_prime_rl_step(out, 5, "B", size=64)
    bench = Bench(prime_rl_layout(out))
    bench.poll()
    bench.poll(1000)
    seen = listening()
    bench.poll(10)
    assert seen == []
    bench.poll(LOOK_AROUND)
    assert seen != []


def test_a_directory_that_was_just_changed_is_not_trusted_to_show_the_next_change(out: Path) -> None:
    """File systems round times: a step that appears within the same tick must still be found."""
    write_prime_rl_step(out, 5, "B", size=64)
    bench = Bench(prime_rl_layout(out))
    bench.poll()
    bench.poll(10)
    root = out / "checkpoints"
    now = int(bench.clock.wall() * 1e9)
    os.utime(root, ns=(now, now))
    bench.poll()
    write_prime_rl_step(out, 10, "B", size=64)
    os.utime(root, ns=(now, now))
    assert 10 in bench.poll()


# -- after a reboot -------------------------------------------------------------------------------------------------


def kept(out: Path, boot: str, started: float = 0.0, place: str = "records") -> CheckpointRecords:
    """What a podwatch of this boot knows."""
    return CheckpointRecords(RecordFiles(out.parent / place), boot_id=boot, boot_wall=started)


def spoil(shard: Path) -> None:
    """Full size, data lost: what a power loss leaves."""
    status = shard.stat()
    with shard.open("r+b") as file:
        file.seek(status.st_size // 2)
        file.write(bytes(status.st_size - status.st_size // 2))
    os.utime(shard, ns=(status.st_mtime_ns, status.st_mtime_ns))


def test_data_lost_at_full_size_is_found_by_every_podwatch_that_starts(out: Path) -> None:
    for step in (5, 10):
        write_prime_rl_step(out, step, "B")
    first = Bench(prime_rl_layout(out), kept(out, "one"))
    first.poll()
    assert all(s.complete for s in first.poll(10).values())
    spoil(out / "checkpoints/step_10/trainer/__0_0.distcp")
    for boot, started in (("one", 0.0), ("two", 0.0), ("three", time.time() + 1e6)):
        after = Bench(prime_rl_layout(out), kept(out, boot, started))
        after.poll()
        for _ in range(8):
            sets = after.poll(60)
        assert sets[5].complete
        assert sets[10].completeness is Completeness.DAMAGED
        assert "records that are not written" in sets[10].reason


def test_a_hole_after_a_reboot_is_suspect_never_damaged(out: Path) -> None:
    write_custom(out, 5)
    model = out / "step_5" / "data.raw"
    with model.open("r+b") as file:
        file.truncate(0)
        file.truncate(1 << 20)
    bench = Bench(custom(out), kept(out, "one", time.time() + 60))
    bench.poll()
    found = bench.poll(WEAK + 1)[5]
    assert found.completeness is Completeness.WRITING
    assert "data.raw has ranges that were never written" in found.reason
    assert "sparse=never" in found.reason
    before = Bench(custom(out), kept(out, "one", place="others"))
    before.poll()
    assert before.poll(WEAK + 1)[5].complete
    after = Bench(custom(out), kept(out, "two", place="others"))
    after.poll()
    assert after.poll(WEAK + 1)[5].complete, "it was sparse before, so holes say nothing"


# -- a step that training has not shown -----------------------------------------------------------------------------


def test_a_save_that_training_has_not_shown_is_kept_from_the_next_podwatch_too_and_the_operator_can_name_it(
    out: Path, tmp_path: Path
) -> None:
    """podwatch and the trainer die before the log shows the step."""
    for step in (5, 10, 500):
        write_prime_rl_step(out, step, "B", size=64)
    clock = ManualClock()

    def held(*, shown: int | None = None, started_from: int | None = None) -> tuple[CheckpointSet, ...]:
        """What a podwatch that starts now holds back."""
        known = HeldBack()
        known.started_from = started_from
        if shown is not None:
            known.show(shown)
        catalogue = Catalogue(
            prime_rl_layout(out), clock, settle=5.0, settle_weak=WEAK, records=kept(out, "one"), held_back=known
        )
        catalogue.rescan()
        clock.advance(1000)
        sets = catalogue.rescan()
        assert [s.complete for s in sets] == [True] * len(sets)
        assert not any(s.held for s in sets[:2])
        return sets[2:]

    assert not held()[0].held, "nothing is known of training"
    assert "it is at step 12" in held(shown=12)[0].held
    (after,) = held()
    assert after.held_as is HeldAs.IMPLAUSIBLE
    line = Lineage("b")
    chosen = choose([after], lineage=line)
    assert (chosen.source, chosen.rejected[0][0]) == ("none", 500), "never a fresh start over it"
    assert "to use it, name the step" in chosen.reason
    assert choose([after], lineage=line, wanted=500).step == 500

    aside = tmp_path / "quarantine"
    (out / "checkpoints/step_500").rename(aside)
    assert held() == ()
    aside.rename(out / "checkpoints/step_500")
    assert held()[0].held, "it came back"
    assert not held(started_from=500)[0].held
    assert not held()[0].held, "and its record says so"
    assert held(shown=12)[0].held
    assert not held(shown=500)[0].held
    assert not held()[0].held


# -- holes, old formats, no marker ------------------------------------------------------------


def custom(out: Path, last: str = "") -> Layout:
    settings = CustomLayoutSettings(parts="step_{step}", require=("*.raw",), last=last)
    return custom_layout(out, settings)


def write_custom(out: Path, step: int, *, size: int = 200_000, optimizer: bool = True) -> Path:
    directory = out / f"step_{step}"
    directory.mkdir(parents=True)
    (directory / "data.raw").write_bytes(os.urandom(16) * (size // 16))
    if optimizer:
        (directory / f"optimizer_{step}.pt").write_bytes(torch_zip_bytes({"a": 1}))
    (directory / "done").write_text("x")
    return directory


def test_a_hole_makes_a_marked_set_wait_longer(out: Path) -> None:
    directory = write_custom(out, 5)
    with (directory / "data.raw").open("r+b") as file:
        file.truncate(0)
        file.truncate(1 << 20)
    (directory / "done").write_text("x")
    bench = Bench(custom(out, last="done"))
    bench.poll()
    waiting = bench.poll(16)[5]
    assert not waiting.complete
    assert "never written" in waiting.reason
    assert bench.poll(WEAK)[5].complete


def test_the_old_format_is_believed_by_its_size_only(out: Path) -> None:
    def write(step: int, size: int) -> None:
        directory = write_custom(out, step, optimizer=False)
        (directory / "model.pt").write_bytes(LEGACY_MAGIC + bytes(size))
        (directory / "done").write_text("x")

    write(5, 300_000)
    bench = Bench(custom(out, last="done"))
    bench.poll()
    assert "no end to check" in bench.poll(16)[5].reason
    assert bench.poll(WEAK)[5].complete
    write(10, 200_000)
    bench.poll()
    found = bench.poll(WEAK + 1)[10]
    assert not found.complete
    assert "in step 5 it had" in found.reason
    assert any("old torch format" in note for note in bench.catalogue.inspect(5).notes)


def test_without_a_marker_the_file_set_is_learned_and_kept(out: Path) -> None:
    write_custom(out, 5)
    write_custom(out, 10)
    bench = Bench(custom(out), kept(out, "one"))
    bench.poll()
    assert all(s.complete for s in bench.poll(WEAK + 1).values())
    again = Bench(custom(out), kept(out, "one"))
    write_custom(out, 15, optimizer=False)
    again.poll()
    found = again.poll(WEAK + 1)[15]
    assert not found.complete
    assert "it has 0 files like checkpoint/optimizer_#.pt, step 10 has 1" in found.reason
    assert again.poll(6 * WEAK)[15].completeness is Completeness.INCOMPLETE, "above the newest complete one: it is kept"
    (out / "step_15" / "optimizer_15.pt").write_bytes(torch_zip_bytes({"a": 1}))
    again.poll()
    assert again.poll(WEAK + 1)[15].complete


def test_a_trainer_that_saves_something_else_now_is_learned_anew(out: Path) -> None:
    write_custom(out, 5)
    bench = Bench(custom(out))
    bench.poll()
    assert bench.poll(WEAK + 1)[5].complete
    for step in (10, 15):
        write_custom(out, step, optimizer=False)
    bench.poll()
    assert not bench.poll(WEAK + 1)[10].complete
    for _ in range(4):
        sets = bench.poll(6 * WEAK)
    assert sets[15].complete
    assert sets[10].complete


# -- a trainer that does as it likes ------------------------------------------------------------

_WILD = """
import os, random, select, shutil, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.checkpoints import write_prime_rl_step
out, chance = Path({out!r}), random.Random(7)
(out / "checkpoints").mkdir(parents=True, exist_ok=True)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    step = chance.randrange(6)
    place = out / "checkpoints" / f"step_{{step}}"
    act = chance.randrange(5)
    try:
        if act <= 1:
            write_prime_rl_step(out, step, "B", size=64)
        elif act == 2:
            shutil.rmtree(place)
        elif act == 3:
            place.rename(out / "checkpoints" / f"old_{{chance.random()}}")
        else:
            shard = next((place / "trainer").glob("*.distcp"))
            shard.write_bytes(os.urandom(chance.randrange(200)))
    except (OSError, StopIteration):
        pass
"""


def test_a_wild_writer_never_brings_a_traceback_or_an_alarm(out: Path) -> None:
    root = str(Path(__file__).parent.parent.parent)
    code = _WILD.format(root=root, out=str(out))
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    bench = Bench(prime_rl_layout(out), kept(out, "one"))
    looks, end = 0, time.monotonic() + 2.0
    while looks < 10 or time.monotonic() < end:
        assert writer.poll() is None
        for found in bench.poll(1).values():
            assert not found.complete or found.save_id
            try:
                bench.catalogue.contents(found.step)
                bench.catalogue.verify(found.step)
            except HostError:
                pass
        looks += 1
    writer.communicate(b"enough\n")
    assert writer.returncode == 0
    assert bench.catalogue.problem == ""
    bench.poll()
    bench.poll(1000)
    assert all(s.completeness is not Completeness.WRITING for s in bench.poll(10_000).values())
