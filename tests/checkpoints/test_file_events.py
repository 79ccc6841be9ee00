"""Events wake the rescan; whatever the system refuses, nothing raises."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podwatch.checkpoints.file_events import Watcher

PATIENCE = 60.0


class Bell:
    def __init__(self) -> None:
        self.rung = threading.Event()
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        self.rung.set()

    def heard(self, within: float = PATIENCE) -> bool:
        heard = self.rung.wait(within)
        self.rung.clear()
        return heard


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def watch(bell: Bell) -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def make(*roots: Path, **more: object) -> Watcher:
        watcher = Watcher(lambda: roots, bell, debounce=0.05, **more)  # type: ignore[arg-type]
        made.append(watcher)
        watcher.start()
        return watcher

    yield make
    for watcher in made:
        watcher.stop()


def test_a_file_that_is_written_wakes_once(tmp_path: Path, bell: Bell, watch: Callable[..., Watcher]) -> None:
    (tmp_path / "x").touch()  # or its creation wakes too, once the writes take longer than the debounce
    watch(tmp_path)
    with (tmp_path / "x").open("wb") as file:
        for _ in range(200):
            file.write(b"x" * 4096)
    assert bell.heard()
    assert not bell.heard(0.3)
    assert bell.count <= 2


def test_a_rename_wakes(tmp_path: Path, bell: Bell, watch: Callable[..., Watcher]) -> None:
    (tmp_path / "a").touch()
    watch(tmp_path)
    (tmp_path / "a").rename(tmp_path / ".metadata")
    assert bell.heard()


def test_a_root_that_does_not_exist_yet(tmp_path: Path, bell: Bell, watch: Callable[..., Watcher]) -> None:
    root = tmp_path / "outputs" / "checkpoints"
    watcher = watch(root)
    (tmp_path / "unrelated").touch()
    assert not bell.heard(0.3), "only names on the way to the root matter"
    root.parent.mkdir()
    assert bell.heard()
    watcher.refresh()
    root.mkdir()
    assert bell.heard()
    watcher.refresh()
    (root / "step_5").mkdir()
    assert bell.heard()


def test_a_root_that_was_replaced_is_watched_anew(tmp_path: Path, bell: Bell, watch: Callable[..., Watcher]) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    watcher = watch(root)
    root.rename(tmp_path / "old")
    root.mkdir()
    watcher.refresh()
    bell.heard(0.3)
    (root / "step_5").mkdir()
    assert bell.heard()


def test_a_dead_observer_is_replaced(tmp_path: Path, bell: Bell, watch: Callable[..., Watcher]) -> None:
    watcher = watch(tmp_path)
    assert watcher.alive
    watcher._observer.stop()
    until(lambda: not watcher.alive)
    watcher.refresh()
    assert watcher.alive
    (tmp_path / "x").touch()
    assert bell.heard()


def test_no_inotify_is_a_warning(
    tmp_path: Path, bell: Bell, watch: Callable[..., Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    from podwatch.checkpoints import file_events as module

    class Refuses:
        daemon = False

        def start(self) -> None:
            raise OSError(24, "inotify instance limit reached")

    lines: list[str] = []
    monkeypatch.setattr(module, "Observer", Refuses)
    watcher = watch(tmp_path, warn=lines.append)
    watcher.refresh()
    assert not watcher.alive
    assert len(lines) == 1
    assert "by rescans alone" in lines[0]


def test_wake_that_fails_and_stop_twice(tmp_path: Path) -> None:
    def closed() -> None:
        raise RuntimeError("Event loop is closed")

    watcher = Watcher(lambda: (tmp_path,), closed, debounce=0.01)
    watcher.start()
    (tmp_path / "x").touch()
    watcher.stop()
    watcher.stop()
    watcher.refresh()
    assert not watcher.alive
