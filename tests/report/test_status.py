"""The status document: its schema, its states, its verdict."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from podwatch.domain.event import EventName
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import Desired, SensorState, observed, unobserved
from podwatch.domain.status_document import RecoveryView
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.report.json_documents import event_document
from podwatch.report.status import build_status
from podwatch.report.status_screen import headline, render
from tests.report import views

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "schema" / "status.schema.json").read_text())


@pytest.mark.parametrize("name", views.ALL)
def test_document_follows_the_schema(name):
    document = json.loads(json.dumps(build_status(views.ALL[name]())))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert undocumented(document, SCHEMA) == []


def test_why_this_layout_and_what_the_filesystem_tells():
    told = build_status(views.healthy())["daemon"]
    assert (told["layout"], told["layout_because"]) == ("prime-rl", "the command runs rl")
    assert told["capabilities"] == {"filesystem": "ext4", "slow": False, "inotify": True}
    assert build_status(replace(views.healthy(), capabilities=None))["daemon"]["capabilities"] is None


def test_other_file_systems_by_what_lies_there():
    (temp,) = build_status(views.healthy())["other_disks"]
    assert (temp["role"], temp["path"], temp["free_bytes"], temp["used_ratio"]) == ("temp", "/tmp", 3 * views.GB, 0.85)


def test_the_schema_refuses_what_it_should():
    document = build_status(views.healthy())
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for change in ({"overall": "fine"}, {"time": "yesterday"}, {"training": {}}, {"schema_version": 2}):
        assert not validator.is_valid({**document, **change})
    del document["disk"]
    assert not validator.is_valid(document)


def test_an_event_follows_its_schema():
    schema = json.loads((DOCS / "schema" / "event.schema.json").read_text())
    from podwatch.domain.event import Event

    event = event_document(Event(EventName.PUBLISHED, views.WALL, "step 80", fields={"step": 80, "ok": True}, id=3))
    jsonschema.Draft202012Validator(schema).validate(event)
    assert undocumented(event, schema) == []


def undocumented(document, schema, path=""):
    """Fields that the program writes and the schema does not know."""
    if isinstance(document, list):
        return [x for item in document for x in undocumented(item, schema.get("items", {}), path)]
    if not isinstance(document, dict) or "properties" not in schema:
        return []
    known = schema["properties"]
    missing = [f"{path}.{key}" for key in document if key not in known]
    return missing + [x for k, v in document.items() if k in known for x in undocumented(v, known[k], f"{path}.{k}")]


@pytest.mark.parametrize(
    ("name", "overall", "state"),
    [
        ("running", "ok", "running"),
        ("dead-recovering", "critical", "recovering"),
        ("waiting", "critical", "recovering"),
        ("gave-up", "critical", "gave-up"),
        ("not-backed-up", "warning", "running"),
        ("blind", "unknown", "unknown"),
        ("stopped", "ok", "stopped"),
    ],
)
def test_overall_and_state(name, overall, state):
    document = build_status(views.ALL[name]())
    assert (document["overall"], document["training"]["state"]) == (overall, state)
    assert all(r["suggestion"] for r in document["reasons"])
    if overall != "ok":
        assert document["reasons"]


def test_blind_is_never_ok_even_without_a_sensor_entry():
    view = views.healthy()
    snapshot = replace(view.facts.pod, trainer=unobserved(SensorState.PENDING, 0.0, ""))
    document = build_status(views.changed(view, snapshot=snapshot, sensors={}))
    assert document["overall"] == "unknown"
    assert document["reasons"]


def test_a_blind_gpu_sensor_shows_while_training_runs():
    sensors = {**views.healthy().sensors, "gpu": unobserved(SensorState.BLIND, views.NOW - 40.0, "NVML hangs")}
    document = build_status(replace(views.healthy(), sensors=sensors))
    assert document["overall"] == "warning"
    assert "NVML hangs" in document["reasons"][0]["summary"]


def test_a_loop_that_stopped_turning_is_critical():
    document = build_status(replace(views.healthy(), watchdog_ok=False))
    assert document["overall"] == "critical"


def test_a_death_nobody_handles_yet_is_down():
    document = build_status(replace(views.dead_recovering(), recovery=RecoveryView()))
    assert document["training"]["state"] == "down"


def test_a_step_of_the_start_before_does_not_count_as_running():
    view = views.healthy()
    fresh = replace(view.facts.pod, trainer=observed(views.trainer(started_ago=5.0), views.NOW))
    document = build_status(views.changed(view, snapshot=fresh))
    assert document["training"]["state"] == "starting"
    assert document["training"]["step"] is None


def test_finished_and_blocked():
    dead = replace(views.healthy().facts.pod, trainer=observed(views.trainer(alive=False, exit_code=0), views.NOW))
    done = views.changed(views.healthy(), snapshot=dead, desired=Desired.FINISHED)
    assert build_status(done)["training"]["state"] == "finished"
    assert build_status(done)["overall"] == "ok"
    blocked = views.changed(
        done, desired=Desired.RUNNING, recovery=RecoveryView("blocked", blocked=True, detail="pid 7")
    )
    document = build_status(blocked)
    assert (document["training"]["state"], document["overall"]) == ("blocked", "critical")
    assert document["reasons"][0]["summary"] == "pid 7"


def test_a_person_running_training_after_a_give_up_is_running():
    document = build_status(replace(views.healthy(), recovery=RecoveryView("gave-up", gave_up=True)))
    assert document["training"]["state"] == "running"


def test_stored_goes_by_save_and_not_by_step():
    view = views.healthy()
    again = replace(
        view.sync,
        checkpoints=tuple(StoredCheckpoint(n, "x", here=name) for n, name in ((80, "another-save"), (85, "s85"))),
    )
    sets = build_status(replace(view, sync=again))["checkpoints"]["sets"]
    assert [(s["step"], s["stored"]) for s in sets] == [(80, False), (85, True)]
    assert [s["uploading"] for s in sets] == [False, True]


def test_the_catalogue_lists_exactly_the_events_that_exist():
    section = (DOCS / "events.md").read_text().split("\n## Events\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("- `")]
    listed = [name for line in lines for name in re.findall(r"`([a-z-]+)`", line.partition(": ")[0])]
    assert sorted(listed) == sorted(str(n) for n in EventName)


def test_the_catalogue_names_only_kinds_that_exist():
    section = (DOCS / "events.md").read_text().split("\n## Findings\n")[1]
    listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert len(listed) > 10
    assert set(listed) <= {str(n) for n in FindingKind}


def test_a_first_start_is_not_a_training_that_is_down():
    """vLLM loads for minutes: an evening's `podwatch run` must not look like a death until the first step."""
    view = views.healthy()
    loading = replace(view.facts.pod, trainer=observed(views.trainer(started_ago=5.0), views.NOW))
    confirming = RecoveryView(phase="confirming", active=True, confirmed=None)
    document = build_status(views.changed(view, snapshot=loading, recovery=confirming, incident=None))
    assert (document["training"]["state"], document["overall"], document["reasons"]) == ("starting", "ok", [])


def test_a_restart_after_a_failure_stays_critical_until_a_step_and_says_what_is_true():
    view = views.healthy()
    loading = replace(view.facts.pod, trainer=observed(views.trainer(started_ago=5.0), views.NOW))
    confirming = RecoveryView(phase="confirming", active=True, resumed_step=80, confirmed=None, attempts=1)
    again = views.changed(view, snapshot=loading, recovery=confirming, incident=views.incident(resolved=False))
    document = build_status(again)
    assert (document["training"]["state"], document["overall"]) == ("recovering", "critical")
    assert "not reported a step yet" in document["reasons"][0]["summary"]
    assert headline(document) == "TRAINING IS RESTARTING from step 80; no step since the restart yet"


@pytest.mark.parametrize("dead", [False, True])
def test_a_trainer_process_that_ended_is_in_the_first_line(dead):
    """Before the finding is critical, and after."""
    view = replace(views.healthy(), trainer_ended_at=views.NOW - 12)
    if dead:
        finding = Finding(FindingKind.REQUIRED_CHILD_EXITED, Severity.CRITICAL, "the trainer process ended", views.NOW)
        view = replace(view, findings=(finding,))
    document = build_status(view)
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert headline(document) == "TRAINER PROCESS ENDED 12 s ago, its launcher still runs, last step 85"


def test_one_that_may_end_is_not():
    from podwatch.app.status_view import trainer_ended_at
    from podwatch.config.settings import Policies
    from podwatch.detection.rules import DetectionState
    from podwatch.detection.start import Start
    from podwatch.detection.window import Window

    snapshot = views.healthy().facts.pod
    state = DetectionState(start=Start(windows={"role:trainer": Window(armed=True, since=5.0, last=5.0)}))
    assert trainer_ended_at(snapshot, state, Policies()) == 5.0
    assert trainer_ended_at(snapshot, DetectionState(), Policies()) is None
    assert trainer_ended_at(replace(snapshot, desired=Desired.STOPPED), state, Policies()) is None
    done = replace(snapshot.trainer, value=replace(snapshot.trainer.value, finish_line=True))
    assert trainer_ended_at(replace(snapshot, trainer=done), state, Policies()) is None
    blind = unobserved(SensorState.BLIND, 0.0, "denied")
    assert trainer_ended_at(replace(snapshot, trainer=blind), state, Policies()) is None


@pytest.mark.parametrize(
    ("mode", "active", "says"),
    [("act", True, "nothing, podwatch restarts training"), ("observe", False, "`podwatch restart` restarts training")],
)
def test_what_to_do_is_never_to_read_events_while_podwatch_acts(mode, active, says):
    finding = replace(views.death(), suggestion="")
    recovery = RecoveryView(phase="stopping" if active else "running", active=active)
    document = build_status(replace(views.healthy(), findings=(finding,), mode=mode, recovery=recovery))
    (reason,) = [r for r in document["reasons"] if r["kind"] == "silent-death"]
    assert says in reason["suggestion"]


def test_what_a_start_waits_for_is_shown_once():
    """Not as a warning with one advice and as a critical with the opposite one."""
    view = views.healthy()
    why = "pod b possibly still trains this run"
    waits = Finding(FindingKind.BLOCKED, Severity.WARNING, why, views.NOW, "nothing: podwatch takes over at 14:05:30")
    dead = replace(view.facts.pod, trainer=observed(views.trainer(alive=False), views.NOW))
    recovery = RecoveryView(phase="blocked", blocked=True, detail=why)
    document = build_status(views.changed(view, snapshot=dead, findings=(waits,), recovery=recovery))
    (reason,) = document["reasons"]
    assert (reason["severity"], reason["suggestion"]) == ("critical", waits.suggestion)
    assert document["overall"] == "critical"


def waiting(*findings, detail="podwatch waits before it starts training: pid 7"):
    view = views.healthy()
    dead = replace(view.facts.pod, trainer=observed(views.trainer(alive=False), views.NOW))
    recovery = RecoveryView(phase="blocked", blocked=True, detail=detail)
    return build_status(views.changed(view, snapshot=dead, findings=findings, recovery=recovery))


def ambiguous(severity):
    summary = "podwatch waits before it starts training: pid 7"
    return Finding(FindingKind.AMBIGUOUS_TRAINERS, severity, summary, views.NOW, "`podwatch start --attach 7`")


def test_a_wait_within_the_patience_of_a_start_is_a_warning_and_the_question_after_it_critical():
    document = waiting(ambiguous(Severity.WARNING))
    assert (document["training"]["state"], document["overall"]) == ("blocked", "warning")
    assert [r["severity"] for r in document["reasons"]] == ["warning"]
    assert headline(document).startswith("TRAINING IS NOT STARTED YET: podwatch waits")
    document = waiting(ambiguous(Severity.CRITICAL))
    assert document["overall"] == "critical"
    assert [r["severity"] for r in document["reasons"]] == ["critical"]
    assert headline(document).startswith("TRAINING IS DOWN and BLOCKED")


def test_a_wait_beside_anything_else_that_holds_the_start_up_is_critical():
    held = Finding(FindingKind.BLOCKED, Severity.WARNING, "GPU 0 is held", views.NOW, "x")
    assert waiting(ambiguous(Severity.WARNING), held)["overall"] == "critical"
    assert waiting(ambiguous(Severity.WARNING), views.death())["overall"] == "critical"


def test_readings_from_before_the_trainer_changed_say_so():
    seen = views.healthy()
    assert not any(row["outdated"] for name in ("gpus", "inference") for row in build_status(seen)[name])
    document = build_status(replace(seen, trainer_changed_at=seen.now + 1))
    assert all(row["outdated"] for name in ("gpus", "inference") for row in document[name])
    assert render(document, width=120).count("(before the start)") == 3
    assert "before the" not in render(build_status(seen), width=120)
    gone = views.reworded({**document, "training": {**document["training"], "alive": False}})
    assert render(gone, width=120).count("(before the stop)") == 3
    empty = views.reworded({**gone, "gpus": [{**g, "memory_used_bytes": 0} for g in gone["gpus"]]})
    assert render(empty, width=120).count("(before the stop)") == 1, "an empty GPU misleads nobody"


def test_a_trainer_process_that_ended_is_no_ok_status_from_the_first_second_on():
    seen = replace(views.healthy(), trainer_ended_at=views.NOW - 2.0, steps_at_risk=6)
    document = build_status(seen)
    assert document["overall"] == "warning"
    assert document["reasons"][0]["kind"] == "required-child-exited"
    text = render(document, width=120)
    assert text.startswith("TRAINER PROCESS ENDED")
    assert "process ended; its launcher, pid 4242, still runs" in text
    assert "6 steps since the newest checkpoint" in text
    held = Finding(FindingKind.REQUIRED_CHILD_EXITED, Severity.CRITICAL, "it ended", views.NOW - 20)
    assert [r["summary"] for r in build_status(replace(seen, findings=(held,)))["reasons"]] == ["it ended"]


def test_the_trainers_pid_is_not_its_launchers():
    seen = views.healthy()
    trainer = seen.facts.pod.trainer.value
    assert trainer is not None

    def row(*roles: ProcessRole) -> str:
        tree = tuple(
            ProcessSample(ProcessIdentity(5000 + n, 1), 4242, "python", "python", role) for n, role in enumerate(roles)
        )
        now = observed(replace(trainer, descendants=tree), views.NOW)
        text = render(build_status(views.changed(seen, snapshot=replace(seen.facts.pod, trainer=now))), width=120)
        return next(line for line in text.splitlines() if line.startswith("  trainer"))

    assert "pid 5001 (launcher 4242)," in row(ProcessRole.LAUNCHER, ProcessRole.TRAINER)
    assert "2 trainers below pid 4242" in row(ProcessRole.TRAINER, ProcessRole.TRAINER)
    assert "pid 4242, up" in row(ProcessRole.OTHER)
    assert "1 process," in row(ProcessRole.OTHER)
