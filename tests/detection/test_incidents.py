"""The two nights that podwatch was written for, replayed from their recordings by today's rules.

tests/support/pods/incidents.py says what they hold and makes them anew.
"""

import json
import os
from pathlib import Path

import pytest

from podwatch.domain.finding import Agreement, FindingKind, Verdict
from podwatch.recording.format import read_recording
from podwatch.recording.replay import Replay, replay
from tests.support import warm

RECORDINGS = Path(__file__).with_name("recordings")
NIGHTS = {"incident-a": 15 * 60.0, "incident-b": 3 * 3600.0}
"""And after how many seconds a person noticed."""
EMPTY = 1 << 30


def fall(path: Path) -> float:
    """The epoch second of the turn at which GPU 0 was seen empty for good; weight updates empty it for moments."""
    fell: float | None = None
    for segment in read_recording(path):
        for snapshot in segment:
            used = snapshot.gpus.value[0].memory_used_bytes if snapshot.gpus.value else None
            if used is not None:
                fell = (snapshot.wall if fell is None else fell) if used < EMPTY else None
    assert fell is not None
    return fell


@pytest.mark.parametrize("name", NIGHTS)
def test_the_night_would_have_been_saved(name: str) -> None:
    path = RECORDINGS / f"{name}.jsonl.gz"
    fell, result = fall(path), Replay()
    for _ in replay(read_recording(path), result):
        pass
    assert not result.problems
    assert result.end is not None
    assert result.end - fell > NIGHTS[name] - 10, "the recording goes on until a person noticed"
    (act,) = result.acted(Verdict.RESTART)
    assert 0 <= act.at - fell <= 15.0
    assert (act.finding.kind, act.finding.subject) == (FindingKind.SILENT_DEATH, "gpu0")
    agreeing = {e.signal for e in act.finding.evidence if e.agreement is Agreement.AGREES}
    assert {"gpu0 memory", "engine process"} <= agreeing
    assert ("health" in agreeing) == (name == "incident-a"), "nobody could ask the second one"
    assert not [t for t in result.told if t.at < fell], "nothing was wrong before"


def test_the_command_gives_the_same_answer() -> None:
    path = RECORDINGS / "incident-a.jsonl.gz"
    done = warm.podwatch("replay", str(path), "--json", env=os.environ)
    answer = json.loads(done.stdout)
    assert len(answer["would_restart_at"]) == 1
    assert answer["would_restart_at"][0].startswith("2026-01-06T03:00:")
    assert answer["would_finish_at"] == []
