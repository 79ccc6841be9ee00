"""What the controller requested, what each machine costs, and why it must end: one file on the controller's machine,
which pods cannot write. A request is in it before it is sent."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from podwatch.domain.document import Document, Flag, Label, Many, Real, Whole, shown
from podwatch.domain.errors import HostError, IntegrityError
from podwatch.system.files import FileLock, atomic_write, read_file

_Reason = Annotated[str, shown(1000)]
LARGEST = 16 << 20


@dataclass(frozen=True, slots=True)
class Bill:
    """One machine, as long as it costs money. ``id`` empty: its request has no answer yet, and it counts as the most
    expensive one allowed. ``since``, ``until`` (None: it still costs), ``seen`` (last time in a list; None: not yet),
    ``missing`` (since when valid lists lack it) and ``destroyed`` (when the provider confirmed it; None once a list
    shows it again): epoch seconds."""

    provider: Label
    id: Label
    price_per_hour: Real
    since: Real
    until: Real | None = None
    seen: Real | None = None
    missing: Real | None = None
    destroyed: Real | None = None


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """One request for a machine. ``failed``: why it created nothing; ``refused``: a repetition fails too.
    ``booted_at``, ``alive_at``: the first and the last heartbeat from it. ``ended``: why it is destroyed. ``adopted``:
    the list showed it, and its request was in no record. ``configuration``: the digest of controller.toml. ``bills``:
    one, unless the request created several."""

    number: Whole
    provider: Label
    max_price: Real
    requested_at: Real
    account: Label = ""
    configuration: Label = ""
    failed: _Reason = ""
    refused: Flag = False
    booted_at: Real | None = None
    alive_at: Real | None = None
    first_step: Whole | None = None
    last_step: Whole | None = None
    ended: _Reason = ""
    ended_at: Real | None = None
    boot_failure: Flag = False
    adopted: Flag = False
    bills: Many[Bill] = ()

    @property
    def costs(self) -> tuple[Bill, ...]:
        """What costs money now, or may."""
        return tuple(bill for bill in self.bills if bill.until is None)


def _cost(bill: Bill, start: float, now: float) -> float:
    end = now if bill.until is None else min(now, bill.until)
    return bill.price_per_hour * max(0.0, end - max(start, bill.since)) / 3600


def spent(machines: Iterable[MachineRecord], now: float, window: float | None = None) -> float:
    """Money within the last ``window`` seconds; None: ever."""
    start = 0.0 if window is None else now - window
    return sum(_cost(bill, start, now) for machine in machines for bill in machine.bills)


@dataclass(frozen=True, slots=True)
class ControllerRecords(Document):
    """``controller``: this controller's name in the store. ``newest_at``: the clock must not go back behind it: a
    machine would look cheaper."""

    KIND = "podwatch-controller-records"
    FILE = "records of the controller"
    LARGEST = LARGEST

    run_id: Label
    store: Label
    controller: Label
    newest_at: Real = 0.0
    machines: Many[MachineRecord] = ()


@dataclass(slots=True)
class RecordFile:
    """One controller at a time uses it: a second one is refused."""

    path: Path
    run_id: str
    tag: str
    _lock: FileLock | None = field(init=False, default=None)

    def __enter__(self) -> "RecordFile":
        self._lock = FileLock(self.path.with_name(self.path.name + ".lock"))
        self._lock.acquire(what="podwatch controller")
        return self

    def __exit__(self, *problem: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def load(self) -> ControllerRecords:
        """Raises IntegrityError for one that cannot be read: it could hide a machine that costs money."""
        fix = "restore the file. Without it, look at the provider's list, then set first_number and spent_before"
        try:
            data = read_file(self.path, LARGEST)
        except FileNotFoundError:
            return ControllerRecords(self.run_id, self.tag, secrets.token_hex(8))
        except OSError as error:
            raise IntegrityError(f"cannot read the records: {error.strerror}", where=str(self.path), fix=fix) from error
        try:
            found = ControllerRecords.from_bytes(data, where=str(self.path))
        except IntegrityError as error:
            raise IntegrityError(error.what, where=str(self.path), fix=fix) from error
        if (found.run_id, found.store) != (self.run_id, self.tag):
            what = f"the records are those of run {found.run_id} in another store"
            raise IntegrityError(what, where=str(self.path), fix="set records to another file")
        return found

    def save(self, records: ControllerRecords) -> None:
        """Durable when it returns. Raises HostError."""
        try:
            atomic_write(self.path, records.to_bytes(), 0o600)
        except OSError as error:
            what = f"cannot write the records: {error.strerror}"
            raise HostError(what, where=str(self.path), fix="nothing is created without them") from error
