"""Cadence jobs: what becomes of one that runs while podwatch leaves."""

import asyncio
import logging

import pytest

from podwatch.daemon.store_jobs import Jobs


async def test_a_job_that_is_cut_off_by_leaving_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def job() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    jobs = Jobs()
    jobs.every(0.05, "slow", job)
    with caplog.at_level(logging.INFO):
        jobs.start()
        await asyncio.wait_for(began.wait(), 60)
        jobs.stop()
        await asyncio.wait_for(ended.wait(), 60)
        await asyncio.sleep(0.05)
    assert not [r for r in caplog.records if r.exc_info], caplog.text


async def test_a_job_that_fails_is_logged_and_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    times = 0

    async def job() -> None:
        nonlocal times
        times += 1
        raise ValueError("as it happens")

    jobs = Jobs()
    jobs.every(0.05, "failing", job)
    jobs.start()
    async with asyncio.timeout(60):
        while times < 2:
            await asyncio.sleep(0.01)
    jobs.stop()
    assert "as it happens" in caplog.text
