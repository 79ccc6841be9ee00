"""heartbeat.json: what a program far away reads of a run."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from podwatch.app.status_view import heartbeat
from podwatch.detection.learned import Learned
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.lease import Beat, Claim, Heartbeat, HolderState, Pod, read_beat
from podwatch.domain.snapshot import Desired
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.recovery.state import Phase
from podwatch.report.daemon_view import DaemonView
from podwatch.store.runs.judge import Limits, judge
from podwatch.store.runs.read import Activity, RunInStore
from tests.report import views

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/heartbeat.schema.json").read_text())
POD = Pod("w", "m", "b", "p", "pod-1", Instance("slurm", "77", "2", "n1"), "b:1:2:3")


def signed(said: Heartbeat, state: HolderState = HolderState.RUNNING, pod: Pod = POD) -> bytes:
    return said.signed(pod, Claim(3, "n"), state, "2026-01-31T04:00:00Z").to_bytes()


def document(view: DaemonView, state: HolderState = HolderState.RUNNING, pod: Pod = POD) -> dict[str, object]:
    data = signed(heartbeat(view, (), state), state, pod)
    assert Heartbeat.from_bytes(data).to_bytes() == data
    read: dict[str, object] = json.loads(data)
    jsonschema.validate(read, SCHEMA)
    return read


def test_a_pinned_checkpoint_of_a_finished_run_waits_too() -> None:
    """A controller destroys a finished machine once nothing waits."""
    view = views.healthy()
    own = [replace(s, completeness=Completeness.COMPLETE, save_id=f"id{s.step}") for s in view.facts.checkpoints]
    pinned = min(own, key=lambda s: s.step)
    stored = tuple(StoredCheckpoint(s.step, "x", here=s.save_id) for s in own if s is not pinned)
    view = views.changed(view, pins={pinned.step: "best"}, sync=replace(view.sync, checkpoints=stored))

    def waits(view: DaemonView, own: list[CheckpointSet]) -> object:
        return heartbeat(view, own, HolderState.RELEASED).unstored_step

    finished = views.changed(view, desired=Desired.FINISHED, recovery=replace(view.recovery, phase=str(Phase.FINISHED)))
    assert waits(finished, own) == pinned.step
    assert waits(view, own) is None, "during training the newest has the uplink"
    held = [replace(s, held="an earlier branch") if s is pinned else s for s in own]
    assert waits(finished, held) is None
    every = (*stored, StoredCheckpoint(pinned.step, "y", here=pinned.save_id))
    assert waits(replace(finished, sync=replace(view.sync, checkpoints=every)), own) is None


def ended(phase: Phase, desired: Desired) -> DaemonView:
    view = views.healthy()
    return views.changed(view, desired=desired, recovery=replace(view.recovery, phase=str(phase)))


def test_progress_and_instance() -> None:
    view = replace(views.healthy(), target_step=500, learned=Learned(step_seconds=(30.0,) * 20))
    read = document(view)
    assert (read["step"], read["target"], read["rate"], read["outcome"]) == (85, 500, 120.0, None)
    assert str(read["progress_at"]).endswith("Z")
    assert read["instance"] == {"provider": "slurm", "id": "77", "attempt": "2", "node": "n1", "label": ""}
    assert document(view, pod=replace(POD, instance=Instance()))["instance"] is None
    beat = read_beat(signed(Heartbeat()))
    assert beat is not None
    known = (beat.said.instance, beat.said.process, beat.said.host, beat.said.boot_id)
    assert known == (POD.instance, POD.process, "pod-1", "b"), "the next pod learns job, attempt and process"


@pytest.mark.parametrize(
    ("phase", "desired", "state", "outcome"),
    [
        (Phase.RUNNING, Desired.RUNNING, HolderState.RUNNING, None),
        (Phase.FINISHED, Desired.FINISHED, HolderState.RELEASED, "finished"),
        (Phase.STOPPED, Desired.STOPPED, HolderState.RELEASED, "stopped"),
        (Phase.STOPPED, Desired.RUNNING, HolderState.RUNNING, None),
        (Phase.GAVE_UP, Desired.RUNNING, HolderState.RUNNING, "gave-up"),
        (Phase.RUNNING, Desired.RUNNING, HolderState.PREEMPTED, "preempted"),
        (Phase.FINISHED, Desired.FINISHED, HolderState.PREEMPTED, "finished"),
    ],
)
def test_the_outcome(phase: Phase, desired: Desired, state: HolderState, outcome: str | None) -> None:
    assert document(ended(phase, desired), state)["outcome"] == outcome


def test_runs_check_names_the_job_and_the_outcome() -> None:
    read = document(ended(Phase.GAVE_UP, Desired.RUNNING), HolderState.RELEASED)
    beat = Beat(Heartbeat.from_json(read), age=30.0)
    assert (beat.said.outcome, beat.said.instance) == ("gave-up", POD.instance)
    line = judge(RunInStore("run", Activity(0.0, beat)), Limits()).summary
    assert "pod pod-1 (slurm 77, attempt 2) gave up 30 s ago" in line
    old = Beat(Heartbeat(state="released", host="pod-9"), age=30.0)
    assert (
        "pod pod-9 gave up or ended without training" in judge(RunInStore("run", Activity(0.0, old)), Limits()).summary
    )
