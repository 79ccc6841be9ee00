"""The tables in the shadow of the layouts: both judge the same files, and every difference is explained.

Real saves and made ones, stopped after each operation; a step beside another one; a step saved again over itself;
every file of a complete checkpoint cut, removed, filled with zeros, replaced by something else.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.tables.inspector import Inspector
from tests.drivers.checkpoints import Judgement, Layout, judge, one_reader, open_layout
from tests.support.golden import GOLDENS, Golden, files_of, replay, shift
from tests.support.layout_checks import age
from tests.support.layout_makers import Operation, core, more, run
from tests.support.shadow import Shadow, is_explained

pytestmark = pytest.mark.slow

MAKERS = {**core.MAKERS, **more.MAKERS}
each_golden = pytest.mark.parametrize("golden", GOLDENS, ids=lambda g: g.name)
each_maker = pytest.mark.parametrize("name", sorted(MAKERS))


@pytest.fixture(scope="module")
def inspector() -> Iterator[Inspector]:
    with Inspector() as found, one_reader():
        yield found


class Comparison:
    """Both verdicts on one step, again and again."""

    def __init__(self, case: str, layout: Layout, shadow: Shadow) -> None:
        self.case, self.layout, self.shadow = case, layout, shadow
        self.differences: list[str] = []
        self.compared = 0

    def at(self, moment: str, step: int) -> None:
        self.compared += 1
        difference = self.shadow.difference(judge(self.layout, step), step)
        if difference:
            self.differences.append(f"{self.case}, {moment}: {difference}")

    def check(self) -> None:
        assert self.compared
        assert [d for d in self.differences if not is_explained(d)] == []


def of_golden(golden: Golden, out: Path, inspector: Inspector, layout: Layout) -> Comparison:
    where = out / golden.below if golden.below else out
    return Comparison(golden.name, layout, Shadow(inspector, golden.kind, where))


def of_maker(name: str, out: Path, inspector: Inspector) -> tuple[Comparison, Layout]:
    out.mkdir(parents=True, exist_ok=True)
    layout = open_layout(MAKERS[name][0], out, more.COMMANDS.get(name, ()))
    return Comparison(
        name, layout, Shadow(inspector, MAKERS[name][0], out, command=more.COMMANDS.get(name, ()))
    ), layout


# -- moments of a save -------------------------------------------------------------------------------------------------


@each_golden
def test_a_real_save_and_a_second_one_beside_it(golden: Golden, tmp_path: Path, inspector: Inspector) -> None:
    found = of_golden(golden, tmp_path, inspector, golden.make(tmp_path))
    steps = (*golden.steps, *golden.others)[:2]
    for number, step in enumerate(steps):
        for what, path, _ in replay(golden, tmp_path, step=step):
            found.at(f"save {number + 1} {what} {path}", step)
            if number:
                found.at(f"the first at {what} {path}", steps[0])
        shift(tmp_path, -3600)
    found.check()


@each_golden
def test_a_real_save_over_itself(golden: Golden, tmp_path: Path, inspector: Inspector) -> None:
    if golden.source in ("orbax", "lightning", "accelerate"):
        pytest.skip("refuses a directory that exists, or replaces the file in one rename")
    found = of_golden(golden, tmp_path, inspector, golden.make(tmp_path))
    step = golden.steps[0]
    list(replay(golden, tmp_path, step=step))
    shift(tmp_path, -3600)
    for what, path, _ in replay(golden, tmp_path, step=step):
        found.at(f"again {what} {path}", step)
    found.check()


@each_maker
def test_a_made_save_a_second_one_and_one_over_itself(name: str, tmp_path: Path, inspector: Inspector) -> None:
    found, _ = of_maker(name, tmp_path, inspector)
    for number, step in enumerate((10, 20, 10)):
        if number == 2 and name in more.NOT_OVER_ITSELF:
            break
        operations: list[Operation] = MAKERS[name][1](tmp_path, step)
        for count, operation in enumerate(operations, 1):
            operation()
            found.at(f"save {number + 1} {count} of {len(operations)}", step)
            if number == 1 and not count % 5:
                found.at(f"the first at {count} of {len(operations)}", 10)
        age(tmp_path, 100)
    found.check()


# -- one file is broken ------------------------------------------------------------------------------------------------


@each_golden
def test_each_real_file_broken(golden: Golden, tmp_path: Path, inspector: Inspector) -> None:
    layout = golden.copy(tmp_path / "out")
    found = of_golden(golden, tmp_path / "out", inspector, layout)
    break_each(found, files_of(layout, golden.steps[-1]), golden.steps[-1], tmp_path)


@each_maker
def test_each_made_file_broken(name: str, tmp_path: Path, inspector: Inspector) -> None:
    found, layout = of_maker(name, tmp_path / "out", inspector)
    for step in (10, 20):
        run(MAKERS[name][1](tmp_path / "out", step))
        age(tmp_path / "out", 100)
    trackers = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file() and "latest" in p.name]
    break_each(found, [*files_of(layout, 20), *trackers], 20, tmp_path)


def break_each(found: Comparison, files: list[Path], step: int, aside: Path) -> None:
    for path in files:
        status, data, name = path.stat(), path.read_bytes(), path.relative_to(aside / "out").as_posix()

        def put(content: bytes, seconds: float = 0.0, path: Path = path, status: os.stat_result = status) -> None:
            path.write_bytes(content)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(seconds * 1e9)))

        for offset in sorted({0, len(data) // 2, max(0, len(data) - 1)}):
            put(data[:offset])
            found.at(f"cut {name}", step)
        put(data, 7_000)
        found.at(f"newer {name}", step)
        put(data, -7_000)
        found.at(f"older {name}", step)
        path.unlink()
        found.at(f"without {name}", step)
        path.mkdir()
        found.at(f"directory {name}", step)
        path.rmdir()
        os.mkfifo(path)
        found.at(f"pipe {name}", step)
        path.unlink()
        put(data)
        (aside / "elsewhere").write_bytes(data)
        path.unlink()
        path.symlink_to(aside / "elsewhere")
        found.at(f"link {name}", step)
        path.unlink()
        put(data)
    found.at("whole again", step)
    found.check()


@each_golden
def test_foreign_things_in_and_beside_a_checkpoint(golden: Golden, tmp_path: Path, inspector: Inspector) -> None:
    """Pipes, links that lead out, odd names, copies: none is a step, none is opened, none changes a verdict."""
    out = tmp_path / "out"
    layout = golden.copy(out)
    (tmp_path / "secret").write_bytes(b"not ours")
    found = of_golden(golden, out, inspector, layout)
    step = golden.steps[-1]
    for path in [p for p in out.rglob("*") if p.is_dir() and golden.belongs(step, str(p.relative_to(out)))]:
        os.mkfifo(path / "pipe.pt")
        (path / "escaping.pt").symlink_to(tmp_path / "secret")
        (path / "dangling.safetensors").symlink_to("nowhere")
        (path / "new\nline.txt").write_bytes(b"odd")
        (path / ".tmpAb12cD").write_bytes(b"x")
        for name in (f"{path.name}.bad", f"{path.name} (copy)", f".{path.name}"):
            (path.parent / name).mkdir(exist_ok=True)
    shift(out, -7200)
    found.at("foreign things", step)
    assert sorted(found.shadow.layout.steps()) == sorted(layout.steps())
    verdict = found.shadow.inspect(step)
    assert verdict is not None
    assert verdict.whole == (judge(layout, step) or Judgement(False)).whole
    found.check()


# -- what is left ------------------------------------------------------------------------------------------------------


@each_golden
def test_a_half_removed_checkpoint(golden: Golden, tmp_path: Path, inspector: Inspector) -> None:
    layout = golden.copy(tmp_path / "out")
    for order in (1, -1):
        found = of_golden(golden, tmp_path / "out", inspector, layout)
        for path in files_of(layout, golden.steps[-1])[::order]:
            path.unlink()
            found.at(f"removed until {path.name}", golden.steps[-1])
        found.check()
        shutil.rmtree(tmp_path / "out")
        golden.copy(tmp_path / "out")
