"""What a person sees, state by state, as golden texts (rewrite them with PODWATCH_GOLDEN=1)."""

import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.client.status_screen import plugin_line, render, verdict
from podwatch.reporting.status import build_status
from tests.reporting import views

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("name", views.ALL)
def test_golden(name):
    text = render(build_status(views.ALL[name]()))
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("PODWATCH_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", views.ALL)
@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(name, width):
    text = render(build_status(views.ALL[name]()), width=width)
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("running", "TRAINING IS RUNNING at step 85 (18 s ago)"),
        ("dead-recovering", "TRAINING IS DOWN"),
        ("waiting", "restarts it in 80 s"),
        ("gave-up", "GAVE UP"),
        ("blind", "STATE OF TRAINING UNKNOWN"),
        ("stopped", "STOPPED; to start it"),
    ],
)
def test_first_line_is_the_verdict(name, words):
    assert words in render(build_status(views.ALL[name]())).splitlines()[0]


def test_a_trainer_that_lost_its_keeper_is_not_called_somebody_elses():
    document = build_status(views.ALL["running"]())
    document["training"]["supervision"] = "attach"
    assert "not started by podwatch" in render(document, width=200)
    document["reasons"] = [{"kind": "keeper-lost", "severity": "warning", "summary": "x", "suggestion": "y"}]
    assert "started by podwatch, its keeper has ended" in render(document, width=200)


@pytest.mark.parametrize(("at_risk", "unknown"), [(0, False), (None, True)])
def test_steps_are_called_unknown_only_where_no_log_shows_them(at_risk, unknown):
    document = build_status(views.ALL["stopped"]())
    document["training"].update(step=85, step_source="checkpoint", steps_at_risk=at_risk)
    assert ("podwatch finds no later step in" in render(document, width=120).replace("\n", " ")) == unknown


def test_not_backed_up_stands_right_below_the_verdict():
    lines = render(build_status(views.not_backed_up())).splitlines()
    assert lines[1].startswith("NOT BACKED UP")
    assert "NOT BACKED UP" not in render(build_status(views.healthy()))


def test_colour_only_adds_escapes():
    document = build_status(views.dead_recovering())
    coloured = render(document, colour=True)
    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(document)
    assert "\x1b" not in render(document)


def test_what_the_trainer_wrote_cannot_move_the_cursor():
    document = build_status(views.dead_recovering())
    document["reasons"][0]["summary"] = "evil\x1b[2J\nline\x07"
    document["run_id"] = "x\x1b]0;title\x07"
    text = render(document)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil [2J line" in text


@pytest.mark.parametrize("document", [{}, {"running": True}, {"running": True, "training": None, "gpus": "?"}])
def test_a_document_of_another_version_still_renders(document):
    assert verdict(document)
    assert render(document).endswith("\n")


def test_plugin_line_is_one_line_with_performance_data():
    line = plugin_line(build_status(views.healthy()))
    assert line.startswith("PODWATCH OK - TRAINING IS RUNNING at step 85")
    text, _, data = line.partition(" | ")
    assert "|" not in text
    assert data == "step=85 step_age=18s sync_age=840s disk_used=56%;85;;0;100"
    assert plugin_line(build_status(views.gave_up())).startswith("PODWATCH CRITICAL - ")
    assert plugin_line({"running": False, "overall": "unknown"}).startswith("PODWATCH UNKNOWN - ")


@pytest.mark.parametrize(("refused", "word"), [(True, "REFUSED: store refuses the key"), (False, "NOT REACHABLE: ")])
def test_a_store_that_fails_says_why_and_when_it_is_tried_again(refused, word):
    view = views.healthy()
    sync = replace(
        view.sync, ok=False, error="store refuses the key", refused=refused, next_attempt_wall=view.now_wall + 40
    )
    text = " ".join(render(build_status(replace(view, sync=sync)), width=200).split())
    assert word in text
    assert "next attempt in 40 s" in text


def test_notes_alone_do_not_ask_for_attention():
    note = {"severity": "info", "summary": "the operator took training back", "suggestion": "nothing"}
    assert "NOTES (1)" in render({"running": True, "overall": "ok", "reasons": [note]})
    assert "NEEDS ATTENTION (2)" in render({"running": True, "reasons": [note, {**note, "severity": "warning"}]})


@pytest.mark.parametrize("width", [*range(40, 60), 80, 120])
def test_a_number_and_its_unit_stay_on_one_line(width):
    for name in views.ALL:
        lines = [line.strip() for line in render(build_status(views.ALL[name]()), width=width).splitlines()]
        assert not [line for line in lines if re.match(r"(%|[kMG]B|GiB|s|min|h|C)(?!\w)", line)], name


@pytest.mark.parametrize("name", ["dead-recovering", "waiting", "gave-up"])
def test_a_screen_of_an_outage_says_what_it_costs(name):
    """Steps and time, in the facts or in the finding."""
    text = " ".join(render(build_status(views.ALL[name]()), width=120).split())
    assert re.search(r"\d+ steps? lost|the last start made no step", text)
    assert re.search(r"no training for \d+ s|no new checkpoint for 2 h 35 min", text)


def test_the_time_without_a_step_is_shown_unless_the_finding_says_it():
    document = build_status(views.gave_up())
    document["training"].update(step=88, step_at=document["time"], steps_at_risk=3)
    assert "no step for 0 s" in render(document)
    assert "88 of 200, one every 4 min; 3 steps lost" in render(document)
    assert "no step for" not in render(build_status(views.waiting()))
    assert "no step for" not in render(build_status(views.healthy()))


def test_before_the_first_start_nothing_is_said_about_the_last_one():
    document = build_status(views.gave_up())
    document["training"].update(exit=None, pid=None)
    assert "the last start" not in render(document)


def test_an_ended_trainer_explains_empty_gpus_and_a_silent_server():
    living, ended = (render(build_status(views.ALL[name]()), colour=True) for name in ("dead-recovering", "waiting"))
    assert "(was 71.0 GiB)" in living
    assert "(was 71.0 GiB)" not in ended
    assert "\x1b[31mhttp://127.0.0.1:8000 refused" in living
    assert "\x1b[31mhttp://127.0.0.1:8000 refused" not in ended
