"""What an operator reads while something happens: real daemon, real processes."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import kill_engine, messages, published, reasons, running, says, wait_reason
from tests.support.asking import status as document
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.hurry import hurry
from tests.support.ports import free_port
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

BACKUP = "not-backed-up"
LOOK_SECONDS = 0.05


def watch(daemon: DaemonProcess, until: Callable[[], bool], seconds: float) -> list[dict[str, Any]]:
    """Every status that could be read until then."""
    end, found = time.monotonic() + seconds, list[dict[str, Any]]()
    while not (reached := until()) and time.monotonic() < end:
        if (status := daemon.status()) is not None:
            found.append(status)
        time.sleep(LOOK_SECONDS)
    assert reached, daemon.tail()
    return found


def trouble(status: dict[str, Any]) -> list[dict[str, Any]]:
    """What needs attention, the missing store left out."""
    return [r for r in status["reasons"] if r["kind"] != BACKUP]


def test_a_silent_death_is_one_finding_from_the_verdict_to_the_first_step(rig: Rig) -> None:
    daemon = rig.daemon(notify__command=["/bin/true"]).start()
    running(daemon, rig, step=20)
    rig.order(say=["ERROR EngineCore encountered a fatal error"])  # the log says it too
    before = rig.saved[0]
    kill_engine(rig)
    closed = lambda: bool(messages(daemon, "incident-closed"))  # noqa: E731
    seen = watch(daemon, closed, 60.0)
    for status in seen:
        found = trouble(status)
        assert sum(r["severity"] == "critical" for r in found) <= 1, found
        assert not any("podwatch events" in r["suggestion"] for r in found), found
    told = [r for status in seen for r in trouble(status) if "Restart" in r["summary"]]
    assert told
    assert {r["suggestion"] for r in told} == {"nothing, podwatch restarts training"}
    (resumed,) = {e["resumed_step"] for e in daemon.events() if e["podwatch_event"] == "incident-closed"}
    stopping = [s for s in seen if s["recovery"]["phase"] == "stopping"]
    shown = [s["recovery"]["resumed_step"] for s in stopping]
    assert shown == sorted(shown), (shown, "a save may become whole while it stops")
    assert set(shown) <= set(range(before, resumed + 1)), (shown, before, resumed)
    assert f"from step {resumed}" in told[-1]["summary"]
    raised = [e for e in daemon.events() if e["podwatch_event"] == "finding-raised" and e["level"] == "critical"]
    for one, next_one in itertools.pairwise(raised):
        assert (one["finding"], one["subject"]) != (next_one["finding"], next_one["subject"]), raised


@pytest.mark.parametrize("end", ["stop-training", "finish"])
def test_a_run_that_ends_as_it_should_is_green_all_the_time(rig: Rig, end: str) -> None:
    daemon = rig.daemon(gpu__hold="0.3s").start()
    running(daemon, rig, step=10)
    last = ["ERROR EngineCore encountered a fatal error", "RL trainer finished!", "Orchestrator finished."]
    if end == "finish":
        rig.order(finish=True, say=last[:1])
    else:
        rig.order(say=last[:1])
        assert daemon.command("stop-training").returncode == 0
    state = {"finish": "finished", "stop-training": "stopped"}[end]
    seen = watch(daemon, lambda: ((daemon.status() or {}).get("training") or {}).get("state") == state, 60.0)
    quiet = time.monotonic() + 3.0
    seen += watch(daemon, lambda: time.monotonic() > quiet, 10.0)
    if end == "finish":  # the line above comes before the finish line here, and is trouble until then
        seen = [s for s in seen if s["training"]["state"] == state]
    assert seen
    for status in seen:
        assert [r["summary"] for r in status["reasons"] if r["severity"] == "critical"] == []
    says(daemon, 1)  # NOT BACKED UP is a warning, and nothing else is wrong
    assert trouble(seen[-1]) == []


@pytest.fixture(params=["file", "b2"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """The environment and the URL of a store."""
    if request.param == "file":
        yield {}, f"file://{request.getfixturevalue('elsewhere')}"
        return
    server = B2Server(tmp_path / "b2").start()
    try:
        keys = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": server.url}
        yield keys, f"b2://{BUCKET}"
    finally:
        server.stop()


@pytest.mark.parametrize("end", ["stop-training", "finish"])
def test_with_a_store_a_run_that_ended_as_it_should_ends_in_exit_code_0(
    rig: Rig, stored: tuple[dict[str, str], str], end: str
) -> None:
    """Also with an engine's server that is configured, and gone since."""
    environ, store = stored
    gone = f"http://127.0.0.1:{free_port()}"
    daemon = rig.daemon(environ, gpu__hold="0.3s", sync__store=store, inference__urls=[gone]).start()
    running(daemon, rig, step=10)
    published(daemon)
    if end == "finish":
        rig.order(finish=True)
    else:
        assert daemon.command("stop-training").returncode == 0
    state = {"finish": "finished", "stop-training": "stopped"}[end]
    watch(daemon, lambda: document(daemon)["training"]["state"] == state, 60.0)
    last, process = rig.saved[-1], daemon.process
    assert process is not None

    def stored_last() -> bool:
        hurry(process.pid)  # what sends it gives way to everything else: here it gets its turn like the others
        return bool(document(daemon)["sync"]["last_step"] == last)

    sent = watch(daemon, stored_last, 180.0)
    assert [r for one in sent for r in one["reasons"] if r["severity"] == "critical"] == []
    assert "unknown" not in says(daemon, 0), "its log showed every step"
    assert daemon.stop() == 0
    daemon.start()  # the next podwatch knows it as it was left
    daemon.wait_for(daemon.status, 30, "an answer")
    said = says(daemon, 0)
    assert said.startswith(f"TRAINING IS {state.upper()}"), said
    assert document(daemon)["reasons"] == []
    assert len(rig.starts) == 1


def test_checkpoints_that_are_never_complete_are_one_finding_critical_because_nothing_is_stored(
    rig: Rig, elsewhere: Path
) -> None:
    """The rule asks for a file that this trainer never writes: training looks well, and nothing is kept."""
    custom = {"parts": "checkpoints/step_{step}", "require": ["model.bin"]}
    daemon = rig.daemon(
        sync__store=f"file://{elsewhere}",
        trainer__layout="custom",
        trainer__resume_args=["--ckpt.resume-step", "{step}"],
        checkpoints__settle_weak="0.2s",
        checkpoints__settle_tracker="0.2s",
        **{f"checkpoints.custom__{name}": value for name, value in custom.items()},
    ).start()
    kind = "checkpoints-not-complete"
    is_critical = lambda: reasons(daemon).get(kind, {}).get("severity") == "critical"  # noqa: E731
    daemon.wait_for(is_critical, 60, "the finding, critical")
    said = reasons(daemon)[kind]
    assert "by the rule of layout 'custom'" in said["summary"]
    assert "model.bin is missing" in said["summary"]
    assert "nothing of this run is in the store" in said["summary"]
    assert "[checkpoints.custom] require" in said["suggestion"]
    found = document(daemon)
    assert (found["training"]["state"], found["overall"]) == ("running", "critical")
    assert [r["kind"] for r in found["reasons"]] == [kind]
    assert "not complete by the rule" in " ".join(says(daemon, 2).split())


def test_a_run_that_saves_nothing_is_one_finding_as_soon_as_a_few_saves_are_missing(rig: Rig, elsewhere: Path) -> None:
    """Its configuration promises a save every 5 steps, and none comes."""
    (rig.output.parent / "rl.toml").write_text("[ckpt]\ninterval = 5\n")
    rig.trainer_flags = ["--no-saves", "@", "rl.toml"]
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", resources__overdue_floor="1s").start()
    kind = "checkpoint-overdue"
    said = wait_reason(daemon, kind, 60)
    assert "configured: every 5 steps" in said["summary"]
    assert "nothing of this run is in the store" in said["summary"]
    assert "would be lost if training died now" in said["summary"]
    assert said["severity"] == "critical"
    assert [r["kind"] for r in document(daemon)["reasons"]] == [kind]
    says(daemon, 2)
