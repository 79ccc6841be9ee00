"""The parts of a leaving podwatch whose machine is taken away: who says so, and what still fits into the grace."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.app import preemption
from podwatch.app.preemption import Budget, Preemption, fits, system_is_stopping, upload_if_it_fits, why_preempted
from podwatch.domain.facts import StoreFacts

pytestmark = pytest.mark.slow


def say(directory: Path, script: str) -> None:
    program = directory / "systemctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo stopping; exit 1", True),
        ("echo running", False),
        ("echo degraded; exit 1", False),
        ("exec sleep 30", False),
    ],
)
async def test_systemd_is_asked_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: bool
) -> None:
    say(tmp_path, script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    assert await system_is_stopping(booted=tmp_path, within=0.3 if "sleep" in script else 5) is expected
    assert time.monotonic() - began < 20
    assert not await system_is_stopping(booted=tmp_path / "no systemd here")


@pytest.mark.parametrize("init", ["pid1", "detached", ""])
async def test_only_pid_one_and_a_machine_that_stops_are_a_preemption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    monkeypatch.setattr(preemption, "BOOTED", tmp_path / "none")
    assert bool(await why_preempted(init)) is (init == "pid1")


def test_what_fits() -> None:
    assert fits(0, 0, 0.5, 0.0), "all is sent: it is being published"
    assert fits(100, 100, 0.5, 0.6)
    assert not fits(100, 100, 0.5, 0.4)
    assert not fits(1, 0, 0.5, 60), "nothing moves"


async def test_an_upload_that_fits_is_waited_for_and_one_that_does_not_is_dropped_soon() -> None:
    began = time.monotonic()

    def going(rate: float, total: int) -> StoreFacts:
        sent = min(total, int(rate * (time.monotonic() - began)))
        return StoreFacts(uploading_step=None if sent >= total else 5, uploaded_bytes=sent, total_bytes=total)

    class Sending:
        def __init__(self, total: int) -> None:
            self.total = total

        def status(self) -> StoreFacts:
            return going(1000, self.total) if self.total else StoreFacts()

    assert await upload_if_it_fits(Sending(1000), Budget(20))
    assert 0.9 < time.monotonic() - began < 15, "long before the budget's end"
    began = time.monotonic()
    assert not await upload_if_it_fits(Sending(100_000), Budget(20))
    assert time.monotonic() - began < 15
    assert await upload_if_it_fits(Sending(0), Budget(3)), "none is in flight"


async def test_training_is_told_even_when_everything_before_it_hangs() -> None:
    told: list[float] = []
    began = time.monotonic()

    class Hanging:
        def status(self) -> StoreFacts:
            return StoreFacts(uploading_step=5, total_bytes=10)

        async def stop(self) -> None:
            await asyncio.sleep(60)

    class Last(Preemption):
        async def beat(self) -> None:
            await asyncio.sleep(60)

        async def end_training(self) -> None:
            told.append(time.monotonic() - began)

        async def training_ended(self) -> None:
            await asyncio.sleep(60)

        async def last_checkpoint(self) -> None:
            await asyncio.sleep(60)

    leaving = Last(cast(Any, SimpleNamespace(backup=Hanging())), cast(Any, None), "why", job=False)
    await leaving.run(Budget(3), asyncio.sleep(60))
    assert told
    assert told[0] < 30, "what hangs, hangs for a minute"
