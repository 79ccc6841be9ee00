"""What the store says of the run, for the controller, and the two documents that the controller writes there: its claim
``config/controller.json``, and control.json. Blocking; for one thread.

Nothing in the store raises a cap or names a machine to destroy: pods can write there. A store that does not answer, or
refuses the key, says nothing about the pod.
"""

import math
import socket
from dataclasses import dataclass, field

from podwatch.domain.document import At, Document, Label, RunId, Whole
from podwatch.domain.errors import ExitCode, IntegrityError, RemoteError
from podwatch.domain.lease import CLAIM_WAIT_SECONDS, Beat, Control, Heartbeat, read_control
from podwatch.store.interfaces import read_or_none
from podwatch.store.keys import RunKeys
from podwatch.store.objects.base import Objects
from podwatch.store.objects.errors import ObjectTooLarge
from podwatch.store.runs.read import read_activity, store_time
from podwatch.store.verdict import read_verdict
from podwatch.system.clock import Clock

WATCH_GAP_SECONDS = 150.0
"""Between two complete looks that watch one heartbeat. In a longer gap the store may have been away."""


@dataclass(frozen=True, slots=True)
class ControllerClaim(Document):
    """``controller``: its name, which its records have; ``number``: the highest machine that it has requested."""

    KIND = "podwatch-controller-claim"
    FILE = "controller.json"

    run_id: RunId
    controller: Label
    host: Label
    number: Whole
    claimed_at: At


@dataclass(frozen=True, slots=True)
class RunSeen:
    """One look at the store. ``trouble``: why it said nothing; the rest is empty then. ``watched``: seconds for which
    every look has seen this heartbeat. ``control`` None: it cannot be read (``control_problem``). ``end_code``: exit
    code of a run that ended for good. ``outdated``: the heartbeat is of a lower generation than a claim. ``other``: the
    host of another controller that lives; ``number``: the highest machine in its claim, whoever made it; ``settled``:
    seconds until this controller's claim is decided."""

    trouble: str = ""
    beat: Beat | None = None
    watched: float = 0.0
    claim_age: float | None = None
    control: Control | None = field(default_factory=Control)
    control_problem: str = ""
    end_code: int | None = None
    outdated: bool = False
    other: str = ""
    number: int = 0
    settles_in: float = 0.0


@dataclass(slots=True)
class RunView:
    store: Objects
    keys: RunKeys
    clock: Clock
    controller: str
    wait: float = CLAIM_WAIT_SECONDS
    """From this controller's claim until it may request a machine: another's claim has arrived by then."""
    _watch: tuple[str, float, float] | None = None
    """The heartbeat's mark, and the boottime of the first and the last look that saw it so."""
    _claimed_at: float | None = None
    """Boottime of this process's first claim since another controller was seen; None: it has none. A dry run never has
    one."""
    _renewed_at: float = -math.inf

    def read(self, *, number: int, claims: bool) -> RunSeen:
        """``number``: the highest machine in the records; ``claims``: write this controller's claim."""
        try:
            return self._read(number, claims)
        except RemoteError as error:
            self._watch = None
            return RunSeen(trouble=str(error))

    def _read(self, number: int, claims: bool) -> RunSeen:
        began, wall = self.clock.boottime(), self.clock.wall()
        active = read_activity(self.store, self.keys, wall)
        control, problem = self._read_control()
        other, highest = self._claim(number, active.now, claims)
        return RunSeen(
            beat=active.beat,
            watched=self._watched(active.beat.mark if active.beat is not None else "", began),
            claim_age=active.claim_age,
            control=control,
            control_problem=problem,
            end_code=self._end_code(active.said),
            outdated=active.is_outdated,
            other=other,
            number=highest,
            settles_in=0.0 if self._claimed_at is None else max(0.0, self._claimed_at + self.wait - began),
        )

    def _watched(self, mark: str, at: float) -> float:
        since, last = self._watch[1:] if self._watch is not None and self._watch[0] == mark else (at, at)
        since = at if at - last > WATCH_GAP_SECONDS else since
        self._watch = mark, since, at
        return at - since

    def _end_code(self, said: Heartbeat) -> int | None:
        if "finished" in (said.desired, said.outcome):
            return int(ExitCode.OK)
        if said.end is not None and said.end.exit_code == ExitCode.DO_NOT_RUN:
            return said.end.exit_code
        last = read_verdict(self.store, self.keys)
        ended = last.last is not None and last.last.code == ExitCode.DO_NOT_RUN and last.attempt is None
        return int(ExitCode.DO_NOT_RUN) if ended else None

    # -- control.json -------------------------------------------------------------------------------------------------

    def _read_control(self) -> tuple[Control | None, str]:
        try:
            return read_control(read_or_none(self.store, self.keys.control, Control), where=self.keys.control), ""
        except (IntegrityError, ObjectTooLarge) as error:
            return None, str(error)

    def write_control(self, wanted: Control, read: Control) -> None:
        """Unless somebody has changed it since it was ``read``. Raises RemoteError."""
        if self._read_control()[0] == read:
            self.store.put(self.keys.control, wanted.to_bytes())

    # -- which controller ---------------------------------------------------------------------------------------------

    @property
    def _claim_key(self) -> str:
        return self.keys.evidence("config") + ControllerClaim.FILE

    def _claim(self, number: int, now: float, claims: bool) -> tuple[str, int]:
        """(the host of another controller that lives, the highest number in a claim)."""
        found, age = self._read_claim(now)
        ours = found is not None and found.controller == self.controller
        if not ours:
            self._claimed_at = None
        if found is not None and not ours and age < 900.0:  # an older one has ended
            return found.host or found.controller, found.number
        claimed = found.number if found is not None else 0
        due = self._claimed_at is None or self.clock.boottime() - self._renewed_at >= 300.0
        if claims and (due or claimed < number):
            self._put(max(number, claimed), now)
        return "", claimed

    def _read_claim(self, now: float) -> tuple[ControllerClaim | None, float]:
        try:
            data = read_or_none(self.store, self._claim_key, ControllerClaim)
            found = None if data is None else ControllerClaim.from_bytes(data, where=self._claim_key)
        except (IntegrityError, ObjectTooLarge):
            return None, 0.0  # it is replaced: a pod cannot stop the controller by a broken document
        written = next((item.wall for item in self.store.list(self._claim_key)), None)
        return found, max(0.0, now - (now if written is None else written))

    def _put(self, number: int, now: float) -> None:
        claim = ControllerClaim(self.keys.run_id, self.controller, socket.gethostname(), number, now)
        self.store.put(self._claim_key, claim.to_bytes())
        self._renewed_at = self.clock.boottime()
        self._claimed_at = self._renewed_at if self._claimed_at is None else self._claimed_at

    def confirm(self, number: int) -> bool:
        """Whether the claim in the store is this controller's, just before it requests machine ``number``, which the
        claim then names. Raises RemoteError."""
        now = store_time(self.store, self.clock.wall())
        found, _ = self._read_claim(now)
        ours = found is not None and found.controller == self.controller
        settled = self._claimed_at is not None and self.clock.boottime() - self._claimed_at >= self.wait
        if not ours or not settled:
            return False
        self._put(number, now)
        return True
