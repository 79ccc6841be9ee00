"""One newest step: every outlet shows the same number, and the orchestrator's numbers are none of training."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from podwatch.app.status_view import headline, heartbeat
from podwatch.domain.snapshot import ProgressSample, ProgressSource, observed
from podwatch.domain.status_document import RecoveryView
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.report.daemon_view import DaemonView
from podwatch.report.metrics import exposition, for_wandb, make_registry
from podwatch.report.status import build_status
from podwatch.report.status_screen import headline as first_line
from podwatch.report.status_screen import render
from podwatch.report.steps_at_risk import steps_at_risk
from tests.report import views

LAST = "; the trainer is alive, last step 85"
STARTED = views.NOW - 11_520.0


def seen(*samples: ProgressSample) -> DaemonView:
    view = views.healthy()
    return views.changed(view, snapshot=replace(view.facts.pod, progress=observed(samples, views.NOW)))


def shown(view: DaemonView) -> dict[str, object]:
    """The newest step as each outlet shows it; None where it shows none."""
    document = build_status(view)
    metrics = {
        sample.name: sample.value
        for family in text_string_to_metric_families(exposition(make_registry(lambda: view)).decode())
        for sample in family.samples
    }
    figures = for_wandb(view)
    line = re.search(r"step (\d+)", headline("watching", view.facts.pod))
    first = re.search(r"at step (\d+)|last step (\d+)", first_line(document))
    return {
        "status": document["training"]["step"],
        "metrics": int(metrics["podwatch_step"]) if "podwatch_step" in metrics else None,
        "wandb": int(figures["podwatch/step"]) if "podwatch/step" in figures else None,
        "heartbeat": heartbeat(view, ()).step,
        "systemctl": int(line[1]) if line else None,
        "first line": int(first[1] or first[2]) if first else None,
    }


def test_a_pod_on_which_only_the_orchestrator_counts_made_no_step() -> None:
    view = seen(
        ProgressSample(ProgressSource.STEP_LINE, "orchestrator", views.NOW - 5, 12),
        ProgressSample(ProgressSource.HEARTBEAT, "trainer", views.NOW - 3),
    )
    assert set(shown(view).values()) == {None}
    document = build_status(view)
    assert document["training"]["state"] == "starting"
    assert first_line(document).startswith("TRAINING IS STARTING")
    assert "step 12" not in render(document)
    assert steps_at_risk(view.facts.pod, view.facts.checkpoints, None, view.sync) is None


SAMPLES = st.lists(
    st.builds(
        ProgressSample,
        st.sampled_from(ProgressSource),
        st.sampled_from(["trainer", "orchestrator", "inference", "launcher", ""]),
        st.floats(STARTED - 100, views.NOW),
        st.one_of(st.none(), st.integers(0, 1000)),
    ),
    max_size=8,
)


@given(samples=SAMPLES)
def test_every_outlet_shows_the_same_step(samples: list[ProgressSample]) -> None:
    view = seen(*samples)
    found = shown(view)
    trained = [s.step for s in samples if s.step is not None and s.role not in ("orchestrator", "inference")]
    of_this_start = [s for s in samples if s.step in trained and s.at >= STARTED and s.trained]
    order = {ProgressSource.STEP_LINE: 0, ProgressSource.MARKER: 1, ProgressSource.CHECKPOINT: 2}
    best = min(of_this_start, key=lambda s: (order.get(s.source, 9), s.role != "trainer", -s.at), default=None)
    now = [s.step for s in of_this_start if best and s.at >= best.at]  # training can begin again below what is older
    assert set(found.values()) == {max(now, default=None)}, found


@pytest.mark.parametrize(
    ("age", "median", "saving", "says"),
    [
        (92.0, 2.0, False, "NO STEP FOR 92 s (usually 2 s)" + LAST),
        (92.0, 2.0, True, "NO STEP FOR 92 s (usually 2 s)" + LAST + "; a checkpoint is being saved"),
        (9.0, 0.5, False, "TRAINING IS RUNNING at step 85 (9 s ago)"),
        (700.0, 240.0, False, "TRAINING IS RUNNING at step 85 (11 min ago)"),
        (721.0, 240.0, False, "NO STEP FOR 12 min (usually 4 min)" + LAST),
        (5000.0, None, False, "TRAINING IS RUNNING at step 85 (1 h 23 min ago)"),
    ],
)
def test_the_first_line_is_true_about_movement(age: float, median: float | None, saving: bool, says: str) -> None:
    view = seen(ProgressSample(ProgressSource.STEP_LINE, "trainer", views.NOW - age, 85))
    learned = replace(view.learned, step_seconds=() if median is None else (median,))
    view = views.changed(view, learned=learned, snapshot=replace(view.facts.pod, saving=saving))
    assert first_line(build_status(view)) == says


@pytest.mark.parametrize(("confirmed", "said"), [(False, True), (None, False), (True, False)])
def test_a_resume_that_could_not_be_confirmed_is_shown(confirmed: bool | None, said: bool) -> None:
    view = replace(views.healthy(), recovery=RecoveryView(confirmed=confirmed))
    assert ("NOT CONFIRMED" in render(build_status(view))) is said


@pytest.mark.parametrize(
    ("here", "resumed", "stored", "read", "lost"),
    [
        (200, None, None, True, 5),
        (None, 200, None, True, 5),
        (None, None, 200, True, 5),
        (180, 190, 170, True, 15),
        (210, None, 190, True, 0),  # its log is behind the checkpoint
        (None, None, 300, True, 205),
        (None, None, None, True, 205),
        (None, None, None, False, None),
    ],
)
def test_what_a_death_would_cost(
    here: int | None, resumed: int | None, stored: int | None, read: bool, lost: int | None
) -> None:
    """On a new pod the checkpoint that training resumed from is as good as one that was saved here."""
    view = seen(ProgressSample(ProgressSource.STEP_LINE, "trainer", views.NOW - 1, 205))
    sets = () if here is None else (views.checkpoint(here),)
    sync = replace(view.sync, last_step=stored, listed=read)
    assert steps_at_risk(view.facts.pod, sets, resumed, sync.last_step, unread=sync.unread) == lost
    assert steps_at_risk(view.facts.pod, (), None, None) == 205, "without a store nothing is unknown"
    counted = steps_at_risk(view.facts.pod, sets, resumed, sync.last_step, unread=sync.unread, saves_counted=True)
    assert counted == (205 if here is resumed is stored is None and read else None), "a save's number is no step"


def test_without_steps_between_checkpoints_the_cost_of_a_death_is_unknown() -> None:
    saved = ProgressSample(ProgressSource.CHECKPOINT, "checkpoint", views.NOW - 1, 205)
    sets = (views.checkpoint(205),)
    view = seen(saved)
    assert steps_at_risk(view.facts.pod, sets, None, None) is None
    status = render(build_status(replace(view, steps_at_risk=None)))
    assert "podwatch finds no later step in training's logs" in " ".join(status.split())
    counted = seen(saved, ProgressSample(ProgressSource.STEP_LINE, "trainer", views.NOW - 1, 205))
    assert steps_at_risk(counted.facts.pod, sets, None, None) == 0


@pytest.mark.parametrize(
    ("last", "saves", "says"),
    [
        (None, None, "podwatch has not read its content yet"),
        (None, 0, "nothing stored yet"),
        (320, 30, "newest stored: step 320"),
    ],
)
def test_what_the_store_holds_is_said_only_once_it_is_known(last: int | None, saves: int | None, says: str) -> None:
    view = views.healthy()
    stored = tuple(StoredCheckpoint(step, "s") for step in range(saves or 0))
    view = replace(
        view, sync=replace(view.sync, last_step=last, checkpoints=stored, listed=saves is not None, uploading_step=None)
    )
    assert says in render(build_status(view), width=120)
