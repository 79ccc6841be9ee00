"""The open store: one thread for small requests, and whether the store works.

After an error the store is opened again, with the key read again, so that a corrected key is used at the next request.
Trouble is a state that is reported when it begins and when its kind changes, never at every try.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from podwatch.config.settings import Settings
from podwatch.domain.errors import HostError, IntegrityError, InternalError, PodwatchError, RemoteError, is_refusal
from podwatch.domain.event import Emit, Event, EventName
from podwatch.domain.finding import Severity
from podwatch.store.budget import CallBudget
from podwatch.store.keys import RunKeys
from podwatch.store.objects.access import access_for
from podwatch.store.objects.base import Objects
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.objects.open import open_objects, parse_url
from podwatch.store.publish import LeaseLost, LeaseUnsettled
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock

T = TypeVar("T")
SILENT_SECONDS = 120.0
"""A call during which the store answers nothing for this long hangs: a directory on a network can, for ever. Servers
are given up sooner."""
SILENT = f"the store has not answered for {SILENT_SECONDS:.0f} s"
NOT_OF_THE_STORE = (LeaseLost, LeaseUnsettled)
"""Reported where it is found: the store itself answered."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why the store cannot be used. ``refused``: waiting does not help."""

    error: str
    refused: bool
    next_attempt_wall: float | None = None


class StoreConnection:
    """Loop-side object, except ``now``. ``works`` is None until the store has answered or failed for the first time."""

    def __init__(self, settings: Settings, clock: Clock, emit: Emit) -> None:
        self._settings, self._clock, self._emit = settings, clock, emit
        self.url = settings.sync.store
        self.keys = RunKeys(settings.run_id, parse_url(self.url).prefix)
        self.works: bool | None = None
        self.trouble: Trouble | None = None
        self.budget = CallBudget.of_store(self.url)
        self._worker = Worker("store")
        self._objects: Objects | None = None
        self._opened = 0
        self._what = ""
        self._lock = threading.Lock()
        self._asked = 0
        self._silence: tuple[object, float] = (None, 0.0)
        """(what the store has answered so far, since when nothing more), while a call is in progress."""

    @property
    def skew(self) -> float | None:
        """Seconds that this machine's clock is ahead of the store's; None: not known."""
        return None if self._objects is None else self._objects.skew

    @property
    def calls(self) -> Mapping[str, int]:
        """By class, since podwatch started."""
        with self._lock:
            return dict(sum(map(Counter, self.budget.calls.values()), Counter[str]()))

    async def call(self, work: Callable[[Objects], T]) -> T:
        """``work`` with the open store, in the store's thread. Raises what it raises; ConfigurationError or
        PermissionDenied where the key cannot be read."""
        return await self._worker.call(self.now, work)

    def now(self, work: Callable[[Objects], T]) -> T:
        """The same from the store's own thread."""
        self._asked += 1
        if self._objects is None:
            self._opened += 1
            self._objects = open_objects(self.url, access_for(self._settings))
            if isinstance(self._objects, DirectoryObjects):
                self._objects.make_root()
        store, who = self._objects, f"connection {self._opened}"
        try:
            return work(store)
        except (*NOT_OF_THE_STORE, IntegrityError):
            raise
        except (PodwatchError, OSError):
            if not isinstance(store, DirectoryObjects):  # which has no key, and knows which directory it was
                self._objects = None
                store.close()
            raise
        finally:
            self.count(who, store.calls)

    def count(self, who: str, calls: Mapping[str, int]) -> None:
        """Billed calls that ``who`` has made so far. From any thread."""
        with self._lock:
            self.budget.count(who, calls, self._clock.wall())

    def allows(self, names: int) -> bool:
        """Whether a listing of so many names that can wait fits into the calls of today."""
        with self._lock:
            return self.budget.allows(names, self._clock.wall())

    @property
    def shortage(self) -> str:
        with self._lock:
            return self.budget.shortage(self._clock.wall())

    def judge_silence(self) -> None:
        """Call every few seconds: a call that hangs is trouble, which ends with its answer."""
        store, now = self._objects, self._clock.monotonic()
        calls = 0 if store is None else store.calls.total()
        answered = (self._asked, calls) if self._worker.busy_seconds else None
        if answered is None or answered != self._silence[0]:
            self._silence = (answered, now)
            if self._what == SILENT:
                self.well()
        elif now - self._silence[1] >= SILENT_SECONDS:
            self.unwell(RemoteError(SILENT, where=self.url, fix="see whether the network and the store's host work"))

    def well(self) -> None:
        """The store has done what it was asked."""
        if self.works is False:
            self.say(EventName.STORE_RECOVERED, "the store works again")
        self.works, self.trouble, self._what = True, None, ""

    def unwell(self, error: PodwatchError) -> None:
        """Something that the store was asked failed."""
        if isinstance(error, NOT_OF_THE_STORE):
            return
        news = self.works is not False or error.what != self._what
        self.works, self._what = False, error.what
        refused = is_refusal(error)
        before = self.trouble.next_attempt_wall if self.trouble is not None else None
        self.trouble = Trouble(str(error), refused, before)
        if news:
            self.say(EventName.SYNC_FAILED, str(error), Severity.CRITICAL if refused else Severity.WARNING)

    def tries_again_in(self, seconds: float) -> None:
        if self.trouble is not None:
            self.trouble = Trouble(self.trouble.error, self.trouble.refused, self._clock.wall() + seconds)

    def say(
        self, name: EventName, message: str, severity: Severity = Severity.INFO, **fields: str | int | float | bool
    ) -> None:
        self._emit(Event(name, self._clock.wall(), message, severity, fields))

    def close(self) -> None:
        """A call that hangs is abandoned."""
        self._worker.close()


def as_known(error: Exception) -> PodwatchError:
    """``error`` as one of podwatch's."""
    if isinstance(error, PodwatchError):
        return error
    if isinstance(error, OSError):
        return HostError(f"the store does not respond: {error}")
    what = f"the backup failed inside podwatch: {type(error).__name__}: {error}"
    return InternalError(what, fix="please report this; podwatch tries again")
