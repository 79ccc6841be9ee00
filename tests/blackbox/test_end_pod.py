"""A plain pod ends its own rented machine, and never before its checkpoints are safe."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.blackbox.test_job import heartbeat, latest
from tests.support.asking import messages, published, running
from tests.support.daemon import DaemonProcess
from tests.support.provider import Provider, provider_server
from tests.support.rig import Rig

RECIPE = str(Path(__file__).parents[2] / "examples/providers/end_pod.py")


@pytest.fixture
def vast() -> Iterator[Provider]:
    with provider_server() as found:
        yield found


def claim_of_another_pod(store: Path, generation: int) -> None:
    """As it writes it when it takes the run over."""
    own = next(path for path in store.rglob("claims/*") if path.name.startswith(f"{generation - 1}-"))
    other = {"writer_id": "other", "machine": "m2", "boot": "b2", "place": "p", "host": "pod-2"}
    claim = {**json.loads(own.read_text()), **other, "generation": generation, "nonce": "only"}
    unfinished = store / "claim"
    unfinished.write_text(json.dumps(claim))
    unfinished.rename(own.with_name(f"{generation}-only"))


def pod(rig: Rig, vast: Provider, store: Path, **changes: object) -> DaemonProcess:
    """As Vast.ai starts it: the instance's own key is in the environment."""
    environ = {"CONTAINER_ID": "123", "CONTAINER_API_KEY": "pod-key", "VAST_URL": vast.url}
    command = {"end_pod__command": [sys.executable, RECIPE, "vast"], "end_pod__tries": 1}
    return rig.daemon(environ, sync__store=f"file://{store}", **(command | changes)).start()


@pytest.mark.slow
def test_a_finished_pod_is_destroyed_once_its_last_checkpoint_is_stored(
    rig: Rig, elsewhere: Path, vast: Provider
) -> None:
    rig.trainer_flags = ["--max-steps", "12", "--ckpt.interval", "4"]
    vast.at_call = lambda: (latest(elsewhere)["step"], rig.members())
    daemon = pod(rig, vast, elsewhere)
    daemon.wait_event("pod-ending", 120)
    vast.wait()
    assert (vast.state, vast.calls) == ("destroyed", [("DELETE", "/api/v0/instances/123/", {})])
    (step, _) = vast.seen[0]  # type: ignore[misc]
    assert step == 12, "the final checkpoint was in the store before the machine was ended"
    assert "everything is stored" in messages(daemon, "pod-ending")[0]
    assert heartbeat(elsewhere)["outcome"] == "finished"
    assert "pod-key" not in daemon.log.read_text()


@pytest.mark.slow
def test_a_pod_whose_checkpoint_cannot_be_stored_keeps_its_disk(rig: Rig, elsewhere: Path, vast: Provider) -> None:
    store = elsewhere / "store"
    store.mkdir()
    rig.trainer_flags = ["--ckpt.interval", "4"]
    daemon = pod(rig, vast, store, recovery__final_sync="4s")
    running(daemon, rig, step=4)
    published(daemon)
    store.rename(elsewhere / "gone")
    store.write_text("no directory")
    rig.order(finish=True)
    daemon.wait_event("pod-ending", 120)
    vast.wait()
    assert vast.state == "stopped", "never destroyed"
    assert "NOT everything is stored" in messages(daemon, "pod-ending")[0]


@pytest.mark.slow
def test_a_pinned_checkpoint_is_stored_before_the_machine_is_destroyed(
    rig: Rig, elsewhere: Path, vast: Provider
) -> None:
    store = elsewhere / "store"
    store.mkdir()
    rig.trainer_flags = ["--ckpt.interval", "4"]
    daemon = pod(rig, vast, store)
    running(daemon, rig, step=4)
    published(daemon)
    store.rename(elsewhere / "gone")
    store.write_text("no directory")
    skipped = rig.saved[-1] + 4
    running(daemon, rig, step=skipped)
    assert daemon.command("checkpoints", "pin", str(skipped)).returncode == 0
    running(daemon, rig, step=skipped + 4)
    store.unlink()
    (elsewhere / "gone").rename(store)
    rig.order(finish=True)
    daemon.wait_event("pod-ending", 120)
    vast.wait()
    assert vast.state == "destroyed"
    assert list(store.glob(f"**/step_{skipped}/*/manifest.json")), "only this disk had it"


@pytest.mark.slow
def test_a_pause_delays_the_end_of_the_machine_until_unpause(rig: Rig, elsewhere: Path, vast: Provider) -> None:
    store = elsewhere / "store"
    store.mkdir()
    rig.trainer_flags = ["--ckpt.interval", "4"]
    daemon = pod(rig, vast, store, recovery__final_sync="15s")
    running(daemon, rig, step=4)
    published(daemon)
    store.rename(elsewhere / "gone")
    store.write_text("no directory")
    rig.order(finish=True)
    daemon.wait_event("final-sync", 60)
    assert daemon.command("pause").returncode == 0
    daemon.wait_event("run-ended", 60)
    said = "the end of this machine, which is billed, waits for `podwatch unpause`"
    daemon.wait_for(lambda: said in " ".join(daemon.command("status").stdout.split()), 30, "status says so")
    assert vast.calls == []
    assert daemon.command("unpause").returncode == 0
    vast.wait()
    assert vast.state == "stopped", "its newest checkpoint is not stored"


def test_a_pod_that_gave_up_ends(rig: Rig, elsewhere: Path, vast: Provider) -> None:
    rig.order(exit=2, say=["train.py: error: unrecognized arguments: --foo"])
    daemon = pod(rig, vast, elsewhere)
    daemon.wait_event("pod-ending", 120)
    vast.wait()
    assert vast.state == "destroyed", "nothing was ever saved: nothing is lost"


@pytest.mark.slow
def test_a_superseded_pod_ends_itself_and_an_operators_stop_does_not(rig: Rig, elsewhere: Path, vast: Provider) -> None:
    daemon = pod(rig, vast, elsewhere, recovery__standby="1s", sync__heartbeat="5s")
    running(daemon, rig, step=5)
    published(daemon)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60)
    assert vast.calls == []
    assert daemon.command("start").returncode == 0
    running(daemon, rig, after=len(daemon.events()))
    claim_of_another_pod(elsewhere, heartbeat(elsewhere)["generation"] + 1)
    daemon.wait_event("superseded", 120)
    daemon.wait_event("pod-ending", 120)
    vast.wait()
    assert not rig.members() or rig.trainer_pid == 0
    assert vast.state in ("destroyed", "stopped"), "stopped if its newest checkpoint is not in the store"
