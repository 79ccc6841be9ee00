"""Every verdict of the layouts compared with that of the tables, on request: see tests/support/shadow.py."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.tables.inspector import Inspector
from podwatch.checkpoints.tables.table import all_tables
from tests.drivers.checkpoints import COMPARING, Judgement, Layout
from tests.support.shadow import Shadow, is_explained


@pytest.fixture(autouse=True)
def tables_in_the_shadow(request: pytest.FixtureRequest) -> Iterator[None]:
    if not os.environ.get("PODWATCH_SHADOW_TABLES") or "test_tables" in request.node.nodeid:
        yield
        return
    differences: list[str] = []
    with Inspector() as inspector:

        def compare(layout: Layout, step: int, old: Judgement | None) -> None:
            if layout.name in all_tables():
                site = getattr(layout, "_site", None)
                command = site.command if site is not None else getattr(layout, "_command", ())
                place: Path | None = site.checkpoint_dir if site is not None else None
                shadow = Shadow(inspector, layout.name, layout.output_dir, place, command)
                if difference := shadow.difference(old, step):
                    differences.append(f"{layout.name}, {request.node.name}: {difference}")

        COMPARING.append(compare)
        yield
        COMPARING.remove(compare)
    assert sorted({d for d in differences if not is_explained(d)}) == []
