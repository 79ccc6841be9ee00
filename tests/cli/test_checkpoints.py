"""``podwatch checkpoints``: local and stored sets, what holds them, structure and hashes; with no daemon."""

import json
import os
import time

from podwatch.cli.checkpoints import table
from podwatch.journal.journal import Journal
from tests.cli.test_restore import stored  # noqa: F401 - a fixture


def test_deep_compares_every_byte_and_says_when_it_cannot(stored):  # noqa: F811
    machine, output, config, body = stored
    assert machine.podwatch("restore", "-c", config).returncode == 0
    result = machine.podwatch("checkpoints", "verify", "--deep", "-c", config)
    assert (result.returncode, "step 40: sound" in result.stdout) == (0, True), result.stdout + result.stderr
    assert "--deep compares every byte" in machine.podwatch("checkpoints", "verify", "-c", config).stdout

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
    assert "no manifest of this save" in found["notes"][-1]


def test_stored_sets_and_pins_without_a_daemon(stored):  # noqa: F811
    machine, output, config, _ = stored
    assert machine.podwatch("restore", "-c", config).returncode == 0
    journal = Journal.open(machine.directory / "pod" / "state" / "r" / "journal.sqlite")
    journal.pin(40, "the paper's figure 2")
    journal.close()
    found = json.loads(machine.podwatch("checkpoints", "--json", "-c", config).stdout)
    assert [(r["step"], r["here"], r["restored"]) for r in found["remote"]] == [(40, True, True)]
    assert found["sets"][0]["held_by"] == ["pinned: the paper's figure 2", "newest complete"]
    (output / "step_40" / "model.bin").unlink()
    (output / "step_40").rmdir()
    text = machine.podwatch("checkpoints", "-c", config).stdout
    assert "no checkpoints on this pod" in text
    assert "in the store only:" in text
    assert machine.podwatch("checkpoints", "unpin", "40", "-c", config).returncode == 0


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
