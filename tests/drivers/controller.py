"""The controller, driven from outside: one look at a time, over a store and providers that a simulation answers.

A provider has ``list(run_id) -> Listing``, ``create(run_id, generation, label, max_price, env) -> (id, price)`` and
``destroy(machine, label)``; they raise ProviderError, or OutcomeUnknown where it may have been done all the same. A
store has the operations of tests/support/controller_months.py's ``SimStore``.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import pytest

from podwatch.controller.loop import AGAIN_SECONDS, Controller, Look
from podwatch.controller.providers import OutcomeUnknown, ProviderError
from podwatch.controller.run_store import RunStore
from podwatch.domain.replacement import Listing, Rented, RentedState, parse_record
from podwatch.policy.rented_machines import spent
from podwatch.policy.replacement import Action
from tests.drivers.lease import RUN

__all__ = [
    "AGAIN_SECONDS", "Action", "Controller", "Listing", "Look", "OutcomeUnknown", "ProviderError", "Rented",
    "RentedState", "controller_over", "keep_no_money_for_late_looks", "spending_in_books", "trust_the_first_look",
]  # fmt: skip


class Clock(Protocol):
    """Seconds since boot, and since the epoch."""

    def boottime(self) -> float: ...

    def wall(self) -> float: ...


def controller_over(store: Any, providers: Mapping[str, Any], clock: Clock) -> Controller:
    """A controller of the run ``run`` that has not looked yet. ``look()`` looks once and acts; its answer has
    ``decision.action``, ``next_look`` (seconds) and ``again`` (whether it should look sooner than usual)."""
    return Controller(RunStore(store, RUN, clock), "run", dict(providers), clock, parallel=False)


def spending_in_books(records: Iterable[bytes], now: float, window: float | None = None) -> tuple[float, float]:
    """(spent in the last ``window`` seconds, or ever; price per hour of all machines), as the controller's own records
    have it: ``records`` are the objects below ``controller/pods/``."""
    books = tuple(parse_record(data, "run") for data in records)
    so_far = spent(books, now) if window is None else spent(books, now, window)
    return so_far, sum(one.price_per_hour for record in books for one in record.costs)


# -- faults of the controller's own, which the simulation must find ----------------------------------------------------


def keep_no_money_for_late_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rented_machines", "replacement"):
        monkeypatch.setattr(f"podwatch.policy.{module}.LOOK_MARGIN_SECONDS", -3600.0)


def trust_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rented_machines", "replacement"):
        monkeypatch.setattr(f"podwatch.policy.{module}.WATCHED_SECONDS", 0.0)
