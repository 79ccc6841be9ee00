"""A store that refuses for good: a pod that may not train without it is told so; the last holder trains on."""

import dataclasses

import pytest

from podwatch.domain.errors import RemoteError
from podwatch.domain.lease import LeaseAction
from podwatch.policy.who_holds_the_run import Timing
from podwatch.stores.credentials import Credentials
from tests.sync.conftest import Run, World, until

SOON = Timing(patience=0.6, claim_wait=0.1, poll=0.05, refusal=0.3)


async def test_a_new_pod_with_a_wrong_key(b2: World, run: Run) -> None:
    b2.timing, b2.key = SOON, "wrong"
    syncer = await run(b2)
    await until(lambda: syncer.status().locked_out)
    assert "store refuses the key" in str(syncer.status().locked_out)
    assert syncer.standing.act is LeaseAction.ASK
    assert syncer.standing.why_not


async def test_a_key_that_is_corrected_in_time(b2: World, run: Run) -> None:
    right, b2.key = b2.key, "wrong"
    b2.timing = dataclasses.replace(SOON, refusal=1000.0)
    syncer = await run(b2)
    await until(lambda: syncer.status().refused)
    b2.key = right
    await until(lambda: syncer.standing.act is LeaseAction.HOLD)
    assert syncer.status().locked_out is None


async def test_a_corrected_key_is_shown_before_the_claim_is_decided(b2: World, run: Run) -> None:
    """Seen: REFUSED for a minute and a half beside a trainer that had started because the store answered again."""
    right, b2.key = b2.key, "wrong"
    b2.timing = Timing(patience=0.6, claim_wait=1000.0, poll=0.05)
    syncer = await run(b2)
    await until(lambda: syncer.status().refused)
    assert "cannot read the store" in syncer.standing.why_not, "it answers, with a refusal"
    b2.key = right
    await until(lambda: syncer.standing.act is LeaseAction.SETTLE)
    await until(lambda: syncer.status().ok is True)
    assert syncer.standing.act is LeaseAction.SETTLE


async def test_an_outage_is_no_refusal(b2: World, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def unreachable() -> Credentials:
        tries.append(1)
        raise RemoteError("store cannot be reached")

    monkeypatch.setattr(b2, "credentials", unreachable)
    b2.timing = dataclasses.replace(SOON, refusal=0.0)
    syncer = await run(b2)
    await until(lambda: len(tries) > 10)
    assert syncer.status().locked_out is None


async def test_the_last_recorded_holder_trains_on(b2: World, run: Run) -> None:
    b2.timing = SOON
    first = await run(b2)
    await until(lambda: first.standing.act is LeaseAction.HOLD)
    await first.stop()
    b2.key = "wrong"
    second = await run(b2)
    await until(lambda: second.status().refused)
    await until(lambda: second.session.lease is not None and second.session.lease._refusals > 3)
    assert not second.standing.why_not
    assert second.status().locked_out is None
