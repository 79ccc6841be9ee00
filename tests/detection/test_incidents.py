"""The two nights that podwatch was written for, judged by today's rules from their recordings.

tests/support/pods/incidents.py says what they hold and makes such nights.
"""

import json
import os
from pathlib import Path

import pytest

from tests.drivers.detection import Agreement, FindingKind, Night, Verdict, found_in, read_night
from tests.support import warm

NIGHTS = Path(__file__).with_name("nights")
RECORDING = Path(__file__).with_name("recordings") / "incident-a.jsonl.gz"
"""The first one in the format that podwatch records in."""
NOTICED = {"incident-a": 15 * 60.0, "incident-b": 3 * 3600.0}
"""And after how many seconds a person noticed."""
EMPTY = 1 << 30


def fall(night: Night) -> float:
    """The epoch second of the turn at which GPU 0 was seen empty for good; weight updates empty it for moments."""
    fell: float | None = None
    for snapshot in night.turns:
        used = snapshot.gpus.value[0].memory_used_bytes if snapshot.gpus.value else None
        if used is not None:
            fell = (snapshot.wall if fell is None else fell) if used < EMPTY else None
    assert fell is not None
    return fell


@pytest.mark.parametrize("name", NOTICED)
def test_the_night_would_have_been_saved(name: str) -> None:
    night = read_night(NIGHTS / f"{name}.jsonl.xz")
    fell, judged = fall(night), found_in(night)
    assert night.turns[-1].wall - fell > NOTICED[name] - 10, "the recording goes on until a person noticed"
    ((at, finding),) = judged.acted(Verdict.RESTART)
    assert 0 <= at - fell <= 15.0
    assert (finding.kind, finding.subject) == (FindingKind.SILENT_DEATH, "gpu0")
    agreeing = {e.signal for e in finding.evidence if e.agreement is Agreement.AGREES}
    assert {"gpu0 memory", "engine process"} <= agreeing
    assert ("health" in agreeing) == (name == "incident-a"), "nobody could ask the second one"
    assert not [f for f in judged.found if f.from_wall < fell], "nothing was wrong before"


def test_the_command_gives_the_same_answer() -> None:
    done = warm.podwatch("replay", str(RECORDING), "--json", env=os.environ)
    answer = json.loads(done.stdout)
    assert answer["problems"] == []
    assert answer["turns"] == len(read_night(NIGHTS / "incident-a.jsonl.xz").turns)
    assert len(answer["would_restart_at"]) == 1
    assert answer["would_restart_at"][0].startswith("2026-01-06T03:00:")
    assert answer["would_finish_at"] == []
