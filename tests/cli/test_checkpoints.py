"""``podwatch checkpoints``: local and stored sets, what holds them, structure and hashes; with no daemon."""

import json
import os
import time

import pytest

from podwatch.app import held_back_findings
from podwatch.checkpoints.second_writer import Span
from podwatch.cli.checkpoints import table
from podwatch.domain.run_state import RunState
from podwatch.journal.journal import Journal
from tests.cli.test_restore import (
    shelf,  # noqa: F401 - a fixture
    stored,  # noqa: F401 - a fixture
    write_config,
)
from tests.support import starts


def test_deep_compares_every_byte_and_says_when_it_cannot(stored):  # noqa: F811
    machine, output, config, body = stored
    assert machine.podwatch("restore", "-c", config).returncode == 0
    result = machine.podwatch("checkpoints", "verify", "--deep", "-c", config)
    assert (result.returncode, "step 40: sound" in result.stdout) == (0, True), result.stdout + result.stderr
    assert "--deep compares every" in machine.podwatch("checkpoints", "verify", "-c", config).stdout

    model = output / "step_40" / "model.bin"
    before = model.stat()
    with model.open("r+b") as file:  # one flipped bit, as a bad disk makes it: size and time stay
        file.seek(5_000_500)
        file.write(bytes([body[5_000_500] ^ 1]))
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert machine.podwatch("checkpoints", "verify", "-c", config).returncode == 0, "structure does not see it"
    result = machine.podwatch("checkpoints", "verify", "--deep", "--json", "-c", config)
    (found,) = json.loads(result.stdout)["steps"]
    assert (result.returncode, found["sound"], found["compared"]) == (1, False, True)
    assert "within bytes 5000000 to 5001000" in found["reasons"][0]

    os.utime(model)  # another save: nobody ever hashed it
    result = machine.podwatch("checkpoints", "verify", "--deep", "--json", "-c", config)
    (found,) = json.loads(result.stdout)["steps"]
    assert (result.returncode, found["compared"]) == (0, False)
    assert "no save with these files" in found["notes"][-1]


def test_stored_sets_and_pins_without_a_daemon(stored):  # noqa: F811
    machine, output, config, _ = stored
    assert machine.podwatch("restore", "-c", config).returncode == 0
    assert (
        machine.podwatch("checkpoints", "pin", "40", "--reason", "the paper's figure 2", "-c", config).returncode == 0
    )
    found = json.loads(machine.podwatch("checkpoints", "--json", "-c", config).stdout)
    assert [(r["step"], r["here"], r["restored"]) for r in found["remote"]] == [(40, True, True)]
    assert found["sets"][0]["held_by"] == ["pinned: the paper's figure 2", "newest complete"]
    (output / "step_40" / "model.bin").unlink()
    (output / "step_40").rmdir()
    text = machine.podwatch("checkpoints", "-c", config).stdout
    assert "no checkpoints on this pod" in text
    assert "only in the store:" in text
    assert machine.podwatch("checkpoints", "unpin", "40", "-c", config).returncode == 0


def held_back(machine, config):
    """(why each step is held back, the newest complete step, problems), as listed without a daemon."""
    result = machine.podwatch("checkpoints", "--json", "-c", config)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    newest = [s["step"] for s in found["sets"] if "newest complete" in s["held_by"]]
    return {s["step"]: s["held_back"] for s in found["sets"]}, newest, found["problems"]


@pytest.fixture
def branched(machine):
    """Steps 100 to 120 on this pod; training has left 110 and 120 behind. Returns (output, config, run.json)."""
    (machine.directory / "store").mkdir()
    output = machine.directory / "out"
    for step in (100, 110, 120):
        (output / f"step_{step}").mkdir(parents=True)
        (output / f"step_{step}" / "model.bin").write_bytes(os.urandom(5000))
    config = write_config(machine.directory / "podwatch.toml", output, machine.directory / "store")
    record = machine.directory / "state" / "r" / "run.json"
    record.parent.mkdir(parents=True)
    left = starts.branched(starts.guarded("old"), "new", 100, wall=time.time())
    record.write_bytes(RunState("r", starts=left).to_bytes())
    return output, config, record


def test_an_earlier_branch_is_known_without_a_daemon(machine, branched):
    _, config, _ = branched
    marks, newest, problems = held_back(machine, config)
    assert marks == {
        100: "",
        **dict.fromkeys((110, 120), "it belongs to an earlier branch of this run, which training has left"),
    }
    assert (newest, problems) == ([100], [])
    assert "earlier branch" in machine.podwatch("checkpoints", "-c", config).stdout


def test_a_record_that_cannot_be_read_is_named_and_stays(machine, branched):
    _, config, record = branched
    newer = json.loads(record.read_text()) | {"schema_version": 99}
    record.write_text(json.dumps(newer))
    marks, newest, (problem,) = held_back(machine, config)
    assert (set(marks.values()), newest) == ({""}, [120])
    assert "cannot mark checkpoints of an earlier lineage: run.json has schema 99" in problem
    assert (
        "problem: podwatch cannot mark checkpoints of an earlier lineage"
        in machine.podwatch("checkpoints", "-c", config).stdout
    )
    record.write_text("{damaged")
    assert held_back(machine, config)[1] == [120]
    assert record.read_text() == "{damaged", "a look changes nothing"


def test_what_the_journal_holds_back_is_known_without_a_daemon(machine, branched):
    output, config, record = branched
    record.write_bytes(RunState("r", starts=starts.guarded("new")).to_bytes())
    now = time.time()
    state = machine.directory / "state" / "r"
    journal = Journal.open(state / "journal.sqlite")
    spans = held_back_findings.HeldSpans((Span(now - 500, now + 500, "pid 7"),))
    journal.learn(held_back_findings.TWO_WRITERS_KEY, spans.to_json())
    stray = output / "step_99999999999999999"
    stray.mkdir()
    (stray / "model.bin").write_bytes(b"x" * 5000)
    journal.close()
    marks, newest, _ = held_back(machine, config)
    assert newest == []
    assert all("a second trainer" in marks[step] for step in (100, 110, 120)), marks
    assert marks[99999999999999999].startswith("its step number is implausible: ")


def test_nothing_is_wider_than_the_terminal():
    found = {
        "step": 1234567,
        "completeness": "incomplete",
        "size_bytes": 47 * 10**9,
        "stored": False,
        "changed_at": "2026-01-31T03:00:00.250Z",
        "reason": "checkpoint/optimizer_10.pt of step 10 has no counterpart here and 11 more " * 3,
        "held_by": ["pinned: by hand"],
    }
    for width in (60, 80, 200):
        lines = table([found], time.time(), width=width)
        assert max(map(len, lines)) <= max(width, 58)
        assert "pinned: by hand" in " ".join(" ".join(lines).split())
