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
class MachineRecord:
    """One machine: requested as ``number``, or shown by a list with our label (``adopted``: its request was in no
    record). A request that created several has a record for each. Times are epoch seconds.

    ``id`` empty: its request has no answer yet, and it counts as the most expensive one allowed. ``failed``: why it
    created nothing; ``refused``: a repetition fails too. ``until`` (None: it still costs), ``seen`` (last time in a
    list; None: not yet), ``missing`` (since when valid lists lack it), ``destroyed`` (when the provider confirmed it;
    None once a list shows it again). ``booted_at``, ``alive_at``: the first and the last heartbeat from it. ``ended``:
    why it is destroyed. ``configuration``: the digest of controller.toml."""

    number: Whole
    max_price: Real
    requested_at: Real
    id: Label = ""
    price_per_hour: Real = 0.0
    until: Real | None = None
    seen: Real | None = None
    missing: Real | None = None
    destroyed: Real | None = None
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

    @property
    def costs(self) -> bool:
        """Whether it costs money now, or may."""
        return not self.failed and self.until is None

    def cost(self, start: float, now: float) -> float:
        """Money from ``start`` to ``now``."""
        end = now if self.until is None else min(now, self.until)
        hours = 0.0 if self.failed else max(0.0, end - max(start, self.requested_at)) / 3600
        return self.price_per_hour * hours


def spent(machines: Iterable[MachineRecord], now: float, window: float | None = None) -> float:
    """Money within the last ``window`` seconds; None: ever."""
    start = 0.0 if window is None else now - window
    return sum(machine.cost(start, now) for machine in machines)


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
