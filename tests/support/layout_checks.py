"""What the tests of every layout ask: its verdict, and that no part of a save is taken for a whole one."""

import os
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts.base import Judgement, Kind, Layout, Recognition, Site
from podwatch.checkpoints.scan import scan_part
from tests.support.layout_makers import Operation


def verdict(layout: Layout, step: int) -> Judgement:
    """As the catalogue asks: list, scan, judge. A step that is not listed is not whole."""
    parts = layout.steps().get(step)
    if parts is None:
        return Judgement(False, "not listed")
    return layout.judge(step, [scan_part(p).found for p in parts])


def whole_prefixes(layout: Layout, step: int, operations: Sequence[Operation]) -> list[int]:
    """Do the operations one by one: after how many, all of them apart, the step is called whole."""
    early = []
    for count, operation in enumerate(operations, 1):
        operation()
        if verdict(layout, step).whole and count < len(operations):
            early.append(count)
    found = verdict(layout, step)
    assert found.whole, found.reason
    return early


def age(root: Path, seconds: float) -> None:
    """Everything below root becomes older by so much, in its own order."""
    for path in root.rglob("*"):
        status = path.lstat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)), follow_symlinks=False)


def relative(paths: Sequence[Path], root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in paths}


def resumed(layout: Layout, command: Sequence[str], step: int | None) -> tuple[str, ...]:
    return layout.resume_command(command, step, "auto", {}).argv


def recognised(kind: Kind, output_dir: Path, command: Sequence[str] = ()) -> Recognition | None:
    return kind.recognise(Site(output_dir, command=tuple(command)))
