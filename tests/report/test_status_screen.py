"""What a person sees, state by state, as golden texts (rewrite them with PODWATCH_GOLDEN=1)."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.cli.find_daemon import Found
from podwatch.cli.status_without_daemon import stale
from podwatch.report.status import build_status
from podwatch.report.status_screen import headline, plugin_line, render
from podwatch.report.terminal_text import CUT, EMPTY, FULL, columns_of, encodable
from podwatch.system.endpoint import Endpoint, write_document
from tests.report import views
from tests.report.views import facts, reworded

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def store_down():
    view = views.healthy()
    error = "Connection refused: api.backblazeb2.com"
    line = "03:59:42 SUCCESS Step 85 | Time: 238.20s | Reward: 0.4120 | Throughput: 10234 tokens/s"
    sync = replace(view.sync, ok=False, error=error, next_attempt_wall=view.now_wall + 40)
    return replace(view, sync=sync, last_log_line=line)


STATES = views.ALL | {"store-down": store_down}


def golden(path, text):
    if os.environ.get("PODWATCH_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", STATES)
def test_golden(name):
    """As the README shows one, of 80 columns."""
    golden(GOLDEN / f"status-{name}.txt", render(build_status(STATES[name]()), width=80))


@pytest.mark.parametrize("width", [120, 50])
def test_golden_at_another_width(width):
    golden(GOLDEN / f"status-running-{width}.txt", render(build_status(STATES["running"]()), width=width))


def test_golden_with_colours():
    golden(GOLDEN / "status-running-80.ansi", render(build_status(STATES["running"]()), width=80, colour=True))


def test_golden_in_ascii():
    text = render(build_status(views.healthy()))
    golden(GOLDEN / "status-running-ascii.txt", encodable(text, "ascii"))


@pytest.mark.parametrize("name", views.ALL)
def test_no_line_is_wider_than_the_terminal(name):
    document = build_status(views.ALL[name]())
    for width in (40, 60, 75, 76, 80, 99, 100, 200):
        text = render(document, width=width)
        assert max(map(len, text.splitlines())) <= width, text


def eight_gpus(**changes):
    document = build_status(views.healthy())
    one = {**document["gpus"][0], "memory_used_bytes": 140 << 30, "memory_total_bytes": 141 << 30}
    one |= {"utilization_percent": 100.0, "temperature_celsius": 101.0} | changes
    document["gpus"] = [one | {"index": n} for n in range(8)]
    return reworded(document)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "100 %"),
        ({"memory_used_bytes": 0, "baseline_bytes": 139 << 30}, "(was 139"),
        ({"memory_used_bytes": 1, "baseline_bytes": 139 << 30, "outdated": True}, "(before the start)"),
        ({"outdated": True}, "(before the start)"),
        ({"role": "shared"}, "C"),
    ],
)
def test_each_gpu_takes_one_line_in_a_usual_width(changes, words):
    document = eight_gpus(**changes)
    for width in range(80, 121):
        lines = render(document, width=width).splitlines()
        first = next(n for n, line in enumerate(lines) if line.lstrip().startswith("GPU 0"))
        table = lines[first : first + 8]
        assert [line.split()[:2] for line in table] == [["GPU", str(n)] for n in range(8)], width
        assert all(any(word in line for word in words.split("|")) for line in table), (width, table[0])
        assert max(map(len, table)) <= width, table


def test_bars_show_the_shares_of_memory_disk_upload_and_progress():
    lines = {line.split()[0]: line for line in render(build_status(views.healthy())).splitlines() if line}
    filled = {name: lines[name].count(FULL) for name in ("progress", "disk", "upload")}
    assert filled == {"progress": 4, "disk": 6, "upload": 3}
    document = build_status(views.healthy())
    document["disk"]["used_ratio"] = 0.999
    assert FULL * 9 + EMPTY in render(reworded(document)), "a bar is full only at 100 %"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "42 %, ends in 2 h 37 min to 3 h"),
        ({"account": None}, "42 %"),
        ({"state": "stopped"}, "42 %, 2 h 37 min to 3 h of training left"),
        ({"state": "finished", "step": 200}, "100 %"),
        ({"step": 199}, "99 %, ends in"),
        ({"step": 250}, "100 %"),
        ({"target_step": None}, None),
        ({"target_step": 0}, None),
        ({"step": None}, None),
    ],
)
def test_progress_in_per_cent_and_time_to_finish(changes, text):
    document = build_status(views.healthy())
    document["account"] = changes.pop("account", document["account"])
    document["training"].update(changes)
    shown = facts(reworded(document)).get("progress")
    assert shown == text or (text is not None and shown.startswith(text) and text.endswith("in"))


def test_an_upload_names_no_time_while_the_store_does_not_answer():
    shown = facts(build_status(store_down()))
    assert shown["upload"] == "step 85: 12 GB of 47 GB (26 %), continues when the store can be used"
    assert shown["store"].endswith("next attempt in 40 s")


def test_the_last_log_line_takes_two_lines_at_most_and_can_have_wide_characters():
    document = build_status(replace(views.healthy(), last_log_line="step \u8bad\u7ec3\u5b8c\u6210 " * 30))
    lines = render(document, width=50).splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("log "))
    assert lines[at + 1].endswith(CUT)
    assert lines[at + 2].startswith("podwatch")
    assert max(map(columns_of, lines)) <= 50


def test_the_last_log_line_shows_no_secret():
    token = "sk-ant-api03-" + "a1B2" * 12
    document = build_status(replace(views.healthy(), last_log_line="x" * 290 + f" key {token}"))
    assert "a1B2" not in json.dumps(document)
    assert len(document["training"]["last_log_line"]) <= 300


def test_what_needs_attention_comes_first_where_the_facts_do_not_fit():
    document = build_status(views.gave_up())
    whole, small = render(document, height=60).splitlines(), render(document, height=20).splitlines()
    assert whole == render(document).splitlines()
    assert sorted(whole) == sorted(small)
    assert small[3].startswith("NEEDS ATTENTION")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("running", "TRAINING IS RUNNING at step 85 (18 s ago)"),
        ("dead-recovering", "TRAINING IS DOWN"),
        ("waiting", "restarts it in 80 s"),
        ("gave-up", "GAVE UP"),
        ("blind", "STATE OF TRAINING UNKNOWN"),
        ("stopped", "STOPPED; to start it"),
        ("evaluating", "STOPPED to evaluate step 85; podwatch then starts it again"),
    ],
)
def test_first_line_is_the_verdict(name, words):
    assert words in render(build_status(views.ALL[name]())).splitlines()[0]


def test_a_trainer_that_lost_its_supervisor_is_not_called_somebody_elses():
    document = build_status(views.ALL["running"]())
    document["training"]["supervision"] = "attach"
    assert "not started by podwatch" in facts(reworded(document))["trainer"]
    finding = build_status(views.blind())["reasons"][0]
    document["reasons"] = [finding | {"kind": "supervisor-lost"}]
    assert "started by podwatch, its supervisor has ended" in facts(reworded(document))["trainer"]


@pytest.mark.parametrize(("at_risk", "unknown"), [(0, False), (None, True)])
def test_steps_are_called_unknown_only_where_no_log_shows_them(at_risk, unknown):
    document = build_status(views.ALL["stopped"]())
    document["training"].update(step=85, step_source="checkpoint", steps_at_risk=at_risk)
    assert ("podwatch finds no later step in" in facts(reworded(document))["step"]) == unknown


def test_not_backed_up_stands_right_below_the_verdict():
    lines = render(build_status(views.not_backed_up())).splitlines()
    assert lines[1].startswith("NOT BACKED UP")
    assert "NOT BACKED UP" not in render(build_status(views.healthy()))


def test_a_finished_run_whose_last_start_made_no_step_shows_its_checkpoint():
    document = build_status(views.healthy())
    document["training"].update(state="finished", step=None)
    assert headline(reworded(document)) == "TRAINING IS FINISHED (newest checkpoint: step 85)"


def test_while_a_claim_settles_the_store_row_says_for_how_long():
    view = views.healthy()
    document = build_status(replace(view, sync=replace(view.sync, settles_in=65.4)))
    assert document["sync"]["settles_in_seconds"] == 65
    says = "this pod's claim of the run is decided in 65 s, nothing is published before"
    assert facts(document)["store"].endswith(says)


def test_a_store_that_podwatch_refuses_to_use_is_not_called_unconfigured():
    document = build_status(views.not_backed_up())
    assert "store       none configured" in render(document)
    document["sync"]["refused"] = True  # a directory on the disk of output_dir
    assert "store       configured, but podwatch does not use it" in render(reworded(document))


def test_a_full_store_is_not_called_unreachable():
    document = build_status(views.healthy())
    error = "the store cannot be used: No space left on device (file:///x): free some"
    document["sync"] |= {"ok": False, "error": error}
    text = facts(reworded(document))["store"]
    assert "NOT USABLE: No space left on device (file:///x): free some" in text
    assert "NOT REACHABLE" not in text
    document["sync"] |= {"error": "the store does not answer"}
    assert "NOT REACHABLE: the store does not answer" in facts(reworded(document))["store"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("stopped", "PODWATCH IS STOPPED: training was STOPPED"),
        ("finished", "PODWATCH IS STOPPED: training was FINISHED"),
        ("gave-up", "PODWATCH IS STOPPED: TRAINING WAS DOWN, nothing restarts it"),
        ("running", "PODWATCH IS STOPPED: training is UNGUARDED"),
    ],
)
def test_without_a_daemon_the_verdict_says_what_training_was(tmp_path, state, words):
    """Seen: "training is UNGUARDED" minutes after the run had finished."""
    document = build_status(views.healthy())
    document["training"].update(state=state, pid=None)
    write_document(tmp_path / "status.json", document)
    endpoint = Endpoint("r", 1, stopped_wall=1.0, config_path="/etc/podwatch/r.toml")
    found = stale(Found(tmp_path, endpoint, alive=False))
    assert headline(found) == words
    assert found["reasons"][0]["suggestion"].startswith("nothing" if state == "finished" else "podwatch run -c /etc")


def test_a_daemon_that_init_starts_again_is_not_started_by_hand(tmp_path):
    write_document(tmp_path / "status.json", build_status(views.healthy()))
    found = Found(tmp_path, Endpoint("r", 1, config_path="/etc/podwatch/r.toml"), alive=False)
    assert stale(found)["reasons"][0]["suggestion"] == "podwatch run -c /etc/podwatch/r.toml"
    (tmp_path / "init.pid").write_text("1\n")  # of an earlier boot: another process
    assert stale(found)["reasons"][0]["suggestion"].startswith("podwatch run")
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", "podwatch"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sleeper:
        assert sleeper.stdout.readline()  # the exec closes Popen's pipe before its arguments can be read
        (tmp_path / "init.pid").write_text(f"{sleeper.pid}\n")
        assert stale(found)["reasons"][0]["suggestion"].startswith("wait some seconds: podwatch's init starts it again")
        sleeper.communicate()


def test_colour_only_adds_escapes():
    document = build_status(views.dead_recovering())
    coloured = render(document, colour=True)
    assert "\x1b[31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == render(document)
    assert "\x1b" not in render(document)


def test_what_the_trainer_wrote_cannot_move_the_cursor():
    document = build_status(views.dead_recovering())
    document["reasons"][0]["summary"] = "evil\x1b[2J\nline\x07"
    document["rows"][0]["text"] = "x\x1b]0;title\x07"
    text = render(document)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil [2J line" in text


@pytest.mark.parametrize("document", [{}, {"running": True}, {"running": True, "rows": "?", "reasons": [1]}])
def test_a_document_of_another_version_still_renders(document):
    assert headline(document)
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
    text = render(reworded(document))
    assert "no step for 0 s" in text
    assert "88 of 200, one every 4 min; 3 steps lost" in text
    assert "no step for" not in render(build_status(views.waiting()))
    assert "no step for" not in render(build_status(views.healthy()))


def test_before_the_first_start_nothing_is_said_about_the_last_one():
    document = build_status(views.gave_up())
    document["training"].update(exit=None, pid=None)
    assert "the last start" not in render(reworded(document))


def test_an_ended_trainer_explains_empty_gpus_and_a_silent_server():
    living, ended = (render(build_status(views.ALL[name]()), colour=True) for name in ("dead-recovering", "waiting"))
    assert "(was 71.0 GiB)" in living
    assert "(was 71.0 GiB)" not in ended
    assert "\x1b[31mhttp://127.0.0.1:8000 refused" in living
    assert "\x1b[31mhttp://127.0.0.1:8000 refused" not in ended


def test_the_nodes_of_a_run_and_the_one_that_ended_it() -> None:
    one = {"host": "n1", "phase": "running", "step": 41, "silent_seconds": 1.0, "reason": False, "here": False}
    other = {"host": "n2", "phase": "gave-up", "step": 40, "silent_seconds": 0.4, "reason": True, "here": True}
    nodes = [{"rank": 0, **one}, {"rank": 1, **other}]
    document = build_status(views.healthy()) | {"nodes": nodes, "node_count": 2}

    def row(count: int) -> tuple[str, str]:
        (found,) = [r for r in reworded(document | {"node_count": count})["rows"] if r["label"] == "nodes"]
        return found["text"], found["tone"]

    assert row(2) == ("0 n1 running step 41; 1 n2 gave-up step 40 (the reason for the end)", "critical")
    assert facts(reworded(document))["store"].endswith("; node 0 uploads for all nodes")
    assert row(3)[0].endswith("(the reason for the end); 1 of 3 nodes has not reported")
    nodes[0]["silent_seconds"], nodes[1]["reason"] = 75.0, False
    assert row(2)[0].startswith("0 n1 running step 41, silent for 75 s")
    assert row(2)[1] == "warning"


def test_what_is_critical_comes_before_training_that_runs() -> None:
    """A headline does not contradict what stands below it."""
    document = build_status(views.healthy())
    finding = build_status(views.blind())["reasons"][0] | {"severity": "critical", "summary": "GPU 1 is lost"}
    worded = reworded(document | {"overall": "critical", "reasons": [finding]})
    assert headline(worded).startswith("GPU 1 is lost; TRAINING IS RUNNING at step 85")
