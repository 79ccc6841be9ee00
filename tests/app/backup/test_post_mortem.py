"""Rounds that store configuration and logs of this pod: only while it holds the run, never with unknown secrets."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from podwatch.app.backup.backup import Backup
from podwatch.app.backup.post_mortem import PostMortem
from podwatch.domain.errors import ConfigurationError
from podwatch.store.evidence import KEEP
from tests.app.backup.backup_world import World, until

SECRET = "abcdefghij0123456789"


class Pod:
    """A pod that holds the run, with a log and a configuration file."""

    def __init__(self, world: World, backup: Backup) -> None:
        self.world, self.backup, self.secrets_known = world, backup, True
        log = world.output / "train.log"
        log.write_text(f"WANDB_API_KEY={SECRET}\nstep 1\n")
        settings = world.settings.model_copy(
            update={"trainer": world.settings.trainer.model_copy(update={"logs": ("train.log",)})}
        )
        loaded = SimpleNamespace(
            settings=settings, text=f'WANDB_API_KEY = "{SECRET}"\n', path="/etc/podwatch.toml", sources={}
        )
        paths = SimpleNamespace(incidents=world.directory / "incidents")
        run = SimpleNamespace(
            guard=world.run, paths=paths, layout=world.run.layout, emit=world.run.events.append, clock=world.clock,
            file=SimpleNamespace(current=SimpleNamespace(last_start=None)),
        )  # fmt: skip
        training = SimpleNamespace(
            environment=SimpleNamespace(build=self._build), launcher=SimpleNamespace(log_path=lambda: "/absent")
        )
        parts = SimpleNamespace(settings=settings, run=run, training=training)
        self.rounds = PostMortem(cast(Any, parts), cast(Any, SimpleNamespace(loaded=loaded)), backup)

    def _build(self, _trainer: object) -> None:
        if not self.secrets_known:
            raise ConfigurationError("cannot read the env file", fix="x")

    def stored(self) -> list[str]:
        return [name for name in self.world.objects() if name.startswith(("logs/", "config/", "incidents/"))]


@pytest.fixture
async def pod(local: World) -> AsyncIterator[Pod]:
    backup = await local.start()
    await until(lambda: backup.lease.holds)
    made = Pod(local, backup)
    yield made
    await made.rounds.stop(last=False)


async def test_logs_and_the_start_are_stored_without_a_secret(pod: Pod) -> None:
    await pod.rounds.store()
    assert pod.rounds.problem == ""
    assert any(name.startswith("logs/") for name in pod.stored())
    assert any(name.startswith("config/") for name in pod.stored())
    for path in pod.world.objects().values():
        assert SECRET.encode() not in path.read_bytes(), path


async def test_where_the_secrets_are_not_known_nothing_is_sent(pod: Pod) -> None:
    """What the scrubber does not know, it cannot remove."""
    pod.secrets_known = False
    await pod.rounds.store()
    assert pod.stored() == []
    assert "env file" in pod.rounds.problem
    await pod.rounds.store()
    assert pod.world.names().count("sync-failed") == 1
    pod.secrets_known = True
    await pod.rounds.store()
    assert pod.rounds.problem == ""
    assert pod.stored()


async def test_nothing_is_sent_while_publishing_is_withheld_or_another_pod_holds_the_run(pod: Pod) -> None:
    pod.world.run.blocked = "the disk is full"
    await pod.rounds.store()
    assert pod.stored() == []
    pod.world.run.blocked = ""
    other = pod.world.other("writer-2")
    waiting = Pod(other, await other.start())
    await waiting.rounds.store()
    assert pod.stored() == []
    await other.stop()


@pytest.mark.parametrize("mode", ["act", "observe"])
async def test_old_evidence_goes_in_mode_act_only(pod: Pod, mode: str) -> None:
    root = pod.world.objects()[next(iter(pod.world.objects()))].parents[1]
    (root / "logs").mkdir()
    for number in range(KEEP["logs"] + 3):
        (root / "logs" / f"{number:03}").write_text("x")
    pod.rounds._settings = pod.rounds._settings.model_copy(update={"mode": mode})
    await pod.rounds.store()
    assert (len(list((root / "logs").iterdir())) > KEEP["logs"]) is (mode == "observe")


async def test_a_store_that_hangs_never_reaches_the_loop(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostMortem, "_put", lambda *_: time.sleep(3))
    began = time.monotonic()
    turns = asyncio.create_task(asyncio.sleep(0.2))
    await pod.rounds.store(within=0.3)
    with contextlib.suppress(asyncio.CancelledError):
        await turns
    assert time.monotonic() - began < 2.5
    assert pod.rounds.problem


async def test_several_calls_make_one_round(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[float] = []

    async def store(**_: Any) -> None:
        rounds.append(0.0)

    monkeypatch.setattr(pod.rounds, "store", store)
    for _ in range(3):
        pod.rounds.soon(after=0.05)
    await until(lambda: rounds)
    await asyncio.sleep(0.2)
    assert len(rounds) == 1
