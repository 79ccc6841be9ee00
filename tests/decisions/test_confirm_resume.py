"""Did the trainer go on where it was told to?"""

from podwatch.domain.snapshot import ProgressSample, ProgressSource
from podwatch.recovery.confirm_resume import ConfirmationState, confirm


def seen(step: int | None, at: float, source: ProgressSource = ProgressSource.STEP_LINE) -> ProgressSample:
    return ProgressSample(source, "trainer", at, step)


def state(samples: list[ProgressSample], now: float = 200.0, resumed: int | None = 40) -> ConfirmationState:
    first = None if resumed is None else resumed + 1
    return confirm(resumed, first, samples, started_at=100.0, now=now, patience=600.0).state


def test_only_a_number_after_the_start_confirms() -> None:
    assert state([seen(39, 90.0), seen(None, 150.0, ProgressSource.HEARTBEAT)]) is ConfirmationState.PENDING
    assert state([seen(41, 150.0)]) is ConfirmationState.CONFIRMED
    assert state([seen(44, 150.0)]) is ConfirmationState.CONFIRMED


def test_the_orchestrators_numbers_prove_nothing() -> None:
    """It numbers its batches ahead, and goes on while a trainer fails to load."""
    ahead = [ProgressSample(ProgressSource.MARKER, "orchestrator", at, step) for at, step in ((150.0, 41), (160.0, 42))]
    assert state(ahead) is ConfirmationState.PENDING
    behind = [
        ProgressSample(ProgressSource.STEP_LINE, "orchestrator", at, step) for at, step in ((150.0, 3), (160.0, 4))
    ]
    assert state([*behind, seen(41, 170.0)]) is ConfirmationState.CONFIRMED


def test_a_lower_number_twice_or_in_two_sources_is_resumed_wrong() -> None:
    assert state([seen(3, 150.0)]) is ConfirmationState.PENDING
    assert state([seen(3, 150.0), seen(4, 160.0)]) is ConfirmationState.RESUMED_WRONG
    both = confirm(40, 41, [seen(3, 150.0), seen(3, 150.2, ProgressSource.MARKER)], 100.0, 200.0, 600.0)
    assert both.state is ConfirmationState.RESUMED_WRONG
    assert both.sources == ("trainer/marker", "trainer/step-line")


def test_the_same_line_twice_is_one_sighting() -> None:
    assert state([seen(3, 150.0), seen(3, 150.3), seen(3, 150.0)]) is ConfirmationState.PENDING


def test_a_run_that_went_back_and_catches_up_is_still_wrong() -> None:
    assert state([seen(3, 150.0), seen(4, 160.0), seen(41, 190.0)]) is ConfirmationState.RESUMED_WRONG


def test_one_stray_line_does_not_stop_a_confirmation() -> None:
    assert state([seen(3, 150.0), seen(41, 190.0)]) is ConfirmationState.CONFIRMED


def test_patience_ends_unconfirmed() -> None:
    assert state([], now=699.0) is ConfirmationState.PENDING
    assert state([], now=700.0) is ConfirmationState.UNCONFIRMED


def test_any_number_confirms_a_fresh_start() -> None:
    assert state([seen(0, 150.0)], resumed=None) is ConfirmationState.CONFIRMED
