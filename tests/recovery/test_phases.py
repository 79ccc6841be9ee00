"""The phases of recovery: the table, which docs/architecture.md shows whole."""

import re
from pathlib import Path

from podwatch.recovery.state import AT_ANY_TIME, FOLLOWERS, Phase, may_follow

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"^ {4}([a-z-]+) +-> +([a-z -]+)$", re.MULTILINE)


def drawn() -> dict[str, set[str]]:
    section = PAGE.read_text().partition("## Phases of recovery\n")[2].partition("\n## ")[0]
    return {before: set(after.split()) for before, after in ROW.findall(section)}


def test_the_page_shows_the_whole_table() -> None:
    table = {"any": AT_ANY_TIME, **FOLLOWERS}
    assert drawn() == {str(before): {str(phase) for phase in after} for before, after in table.items()}


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
