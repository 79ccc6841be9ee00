"""A kill while the tracker is written leaves it empty: that costs the newest step, never all of the run's steps."""

from pathlib import Path

import pytest

from tests.drivers.checkpoints import open_layout
from tests.support.layout_checks import verdict
from tests.support.layout_makers import core, more, run

MAKERS = {**core.MAKERS, **more.MAKERS}
WITH_TRACKERS = ("verl-fsdp", "megatron", "skyrl", "deepspeed", "openrlhf")


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
@pytest.mark.parametrize("name", WITH_TRACKERS)
def test_older_steps_stay_whole(name: str, content: bytes | None, tmp_path: Path) -> None:
    kind, maker = MAKERS[name]
    for step in (10, 20):
        run(maker(tmp_path, step))
    layout = open_layout(kind, tmp_path)
    assert verdict(layout, 10).whole
    for tracker in layout.trackers(20):
        tracker.path.unlink()
        if content is not None:
            tracker.path.write_bytes(content)
    found = verdict(layout, 10)
    assert found.whole, found.reason
    assert not verdict(layout, 20).whole
    assert layout.pinned() == {}
