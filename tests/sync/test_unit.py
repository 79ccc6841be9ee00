"""The upload child's own unit, under a systemd-run that does what a test wants; the real one is in tests/suites."""

import os
import sys
from pathlib import Path

import pytest

from podwatch.domain.errors import RemoteError
from podwatch.sync.upload.child_job import UploadJob
from podwatch.sync.upload.start_child import Children, OwnUnit, Upload
from podwatch.system.child import run_child

RUNS = 'echo "$@" >> {log}\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n'
REFUSES = 'echo "$@" >> {log}\necho "Failed to start transient scope unit: Access denied" >&2\nexit 1\n'
DIES_LATER = RUNS.replace("exec", 'test "$1" = true || exit 1\nexec')


def unit(tmp_path: Path, script: str, *, service: bool = True) -> OwnUnit:
    program = tmp_path / "systemd-run"
    program.write_text("#!/bin/sh\n" + script.format(log=tmp_path / "log"))
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | ({"INVOCATION_ID": "1"} if service else {})
    return OwnUnit(environ, running=tmp_path)


def asked(tmp_path: Path) -> list[str]:
    log = tmp_path / "log"
    return log.read_text().splitlines() if log.exists() else []


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


async def test_tried_once_and_used_with_weights_and_a_name_of_its_own(tmp_path: Path) -> None:
    own = unit(tmp_path, RUNS)
    first, second = await own.prefix(), await own.prefix()
    assert len(asked(tmp_path)) == 1
    assert {"--scope", "--property=CPUWeight=2", "--property=IOWeight=2"} <= set(first)
    assert first != second
    done = await run_child([*first, sys.executable, "-c", "print('alive')"], timeout=60)
    assert (done.code, done.output) == (0, "alive\n")


async def test_where_systemd_refuses_there_is_none(tmp_path: Path) -> None:
    own = unit(tmp_path, REFUSES)
    assert await own.prefix() == ()
    assert await own.prefix() == ()
    assert len(asked(tmp_path)) == 1


async def test_nothing_is_asked_outside_of_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await unit(tmp_path, RUNS, service=False).prefix() == ()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert await unit(tmp_path, RUNS).prefix() == ()
    assert asked(tmp_path) == []


async def test_a_child_that_does_not_come_to_life_under_it_goes_without_the_next_time(tmp_path: Path) -> None:
    own = unit(tmp_path, DIES_LATER)
    job = UploadJob(
        step=1, save_id="s", store=f"file://{tmp_path}/store", writer_id="w", part_size=5_000_000, connections=1,
        lock=str(tmp_path / "lock"), roots={}, files=(),
    )  # fmt: skip

    async def heard(_: object) -> None:
        pass

    children = Children(job.store, own)
    with pytest.raises(RemoteError, match="ended early"):
        await Upload(job, children).run(None, heard, lambda _: None)
    await Upload(job, children).run(None, heard, lambda _: None)
    assert await own.prefix() == ()
