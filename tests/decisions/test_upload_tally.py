"""When uploads are called slower than the saves, and that its numbers add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.facts import OUTCOMES_KEPT, Tally, UploadOutcome
from podwatch.store.uploads import every, in_words, uploads_behind

STORED, SKIPPED, ABANDONED = UploadOutcome.STORED, UploadOutcome.SKIPPED, UploadOutcome.ABANDONED
THIRD = (SKIPPED, SKIPPED, STORED) * 13


def tally(outcomes: tuple[UploadOutcome, ...], upload: float | None = 1300.0, save: float | None = 420.0) -> Tally:
    return Tally(outcomes, upload, save)


def test_every_third_is_stored() -> None:
    behind = tally(THIRD)
    assert uploads_behind(behind)
    assert every(behind.outcomes) == "every third"
    assert in_words(behind.outcomes) == "13 of the last 39 checkpoints are stored, 26 were skipped"


@pytest.mark.parametrize(
    "quiet",
    [
        tally((STORED,) * 10),
        tally((STORED,) * 9 + (SKIPPED,)),
        tally(THIRD + (STORED,) * 5),
        tally(THIRD, upload=400.0),
        tally(THIRD, upload=50.0, save=1.0),
        tally(THIRD, upload=None),
        tally(THIRD, save=None),
        Tally(),
    ],
    ids=[
        "all stored",
        "one skipped",
        "caught up",
        "quick uploads",
        "quick saves",
        "no upload",
        "no saves",
        "nothing",
    ],
)
def test_it_is_not_called_so_without_need(quiet: Tally) -> None:
    assert not uploads_behind(quiet)


@given(st.lists(st.sampled_from(UploadOutcome), max_size=100), st.none() | st.floats(0, 1e6))
def test_the_numbers_add_up_and_survive_the_journal(outcomes: list[UploadOutcome], seconds: float | None) -> None:
    kept = Tally((), seconds, seconds).adding(*outcomes)
    assert len(kept.outcomes) == min(OUTCOMES_KEPT, len(outcomes))
    assert sum(kept.count(o) for o in UploadOutcome) == len(kept.outcomes)
    numbers = [int(w) for w in in_words(kept.outcomes).replace(",", "").split() if w.isdigit()]
    assert numbers[0] + sum(numbers[2:]) == numbers[1]
    assert Tally.kept(kept.to_json()) == kept


@pytest.mark.parametrize(
    "data", [None, [], "x", {"outcomes": ["gone"]}, {"upload_seconds": "x"}, {"save_seconds": -1.0}]
)
def test_what_cannot_be_read_is_forgotten(data: object) -> None:
    assert Tally.kept(data) is None


@pytest.mark.parametrize(
    ("stored", "of", "text"),
    [
        (1, 1, ""),
        (20, 40, "every second"),
        (10, 40, "every fourth"),
        (4, 40, "one in 10"),
        (0, 5, ""),
        (30, 40, ""),
    ],
)
def test_how_often(stored: int, of: int, text: str) -> None:
    assert every((STORED,) * stored + (SKIPPED,) * (of - stored)) == text
