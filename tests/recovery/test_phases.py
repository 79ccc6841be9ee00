"""The phases of recovery: the table, and the ordinary course that docs/architecture.md draws."""

import re
from pathlib import Path

from podwatch.recovery.state import FOLLOWERS, Phase, may_follow

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"^ {4}([a-z-]+) +-> +([a-z -]+)$", re.MULTILINE)


def drawn() -> dict[str, set[str]]:
    section = PAGE.read_text().partition("## Phases of recovery\n")[2].partition("\n## ")[0]
    return {before: set(after.split()) for before, after in ROW.findall(section)}


def test_each_drawn_change_is_in_the_table() -> None:
    rows = drawn()
    assert len(rows) > 5
    for before, after in rows.items():
        assert after <= {str(phase) for phase in FOLLOWERS[Phase(before)]}, before


def test_every_phase_is_in_the_table_and_can_be_reached_in_the_ordinary_course() -> None:
    assert set(FOLLOWERS) == set(Phase)
    reached, left = {Phase.IDLE}, [Phase.IDLE]
    while left:
        new = FOLLOWERS[left.pop()] - reached
        reached |= new
        left += new
    assert reached == set(Phase) - {Phase.PAUSED}, "a pause comes from outside"


def test_what_never_follows() -> None:
    assert not any(may_follow(phase, Phase.ENDING) for phase in (Phase.STOPPED, Phase.FINISHED, Phase.GAVE_UP))
    assert not may_follow(Phase.GAVE_UP, Phase.BACKOFF), "a run that was given up waits for its operator"
    assert not may_follow(Phase.RUNNING, Phase.FINISHED), "what remains of the tree is stopped first"
