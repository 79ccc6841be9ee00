"""What the tests of every layout ask: its verdict, and that no part of a save is taken for a whole one."""

import os
from collections.abc import Sequence
from pathlib import Path

from tests.drivers.checkpoints import Inspection, InspectionOutcome, Layout, judge
from tests.support.layout_makers import Operation


def verdict(layout: Layout, step: int) -> Inspection:
    """As the catalogue asks: list, scan, judge. A step that is not listed is not whole."""
    return judge(layout, step) or Inspection(InspectionOutcome.NOT_COMPLETE, "not listed")


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
