"""Which pod holds a run in the store: pods, claims, the holder's heartbeat, and control.json (docs/pods.md)."""

import hashlib
import re
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, TypeVar

from podwatch.domain.account_document import AccountTotals
from podwatch.domain.document import (
    SCHEMA_VERSION,
    Document,
    Integer,
    Label,
    Real,
    Whole,
    or_null,
    shown,
    strictly,
    unreadable_as,
)
from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance
from podwatch.domain.errors import IntegrityError

_CLAIM_NAME = re.compile(r"(\d{1,18})-([A-Za-z0-9]{1,64})\Z")

CLAIM_WAIT_SECONDS = 150.0
"""From a claim to its decision: longer than a former holder needs that does not see the claim yet, confirms, and writes
with a request that is carried out late."""
PATIENCE_SECONDS = 300.0
"""How old another pod's heartbeat must be before its run is taken over. It is written every minute, and B2 can be slow
or down for a while."""
REFUSAL_SECONDS = 60.0
"""A permanent refusal of the store lasts this long before it counts: all of B2's servers know a new bucket or key well
within this time."""


D = TypeVar("D", bound="Pod")


class HolderState(StrEnum):
    """``state`` in heartbeat.json. PREEMPTED and RELEASED mean that the pod trains no more and no pod waits for it."""

    RUNNING = "running"
    RESTARTING = "restarting"
    PREEMPTED = "preempted"
    RELEASED = "released"


GONE = frozenset({HolderState.PREEMPTED, HolderState.RELEASED})


@dataclass(frozen=True, slots=True)
class Pod:
    """The identity of a pod. ``writer_id`` is kept in podwatch's state directory; ``machine_id`` survives a reboot,
    ``boot_id`` does not; ``place`` identifies the output directory, whose lock allows one trainer on a machine.

    ``process``: the process that is the engine's job (``ProcessIdentity.text``); empty unless podwatch runs as a job.
    """

    writer_id: Label = ""
    machine_id: Label = ""
    boot_id: Label = ""
    place: Label = ""
    host: Label = ""
    instance: Annotated[Instance, or_null(NO_INSTANCE)] = NO_INSTANCE
    process: Label = ""

    def same_job(self, other: "Pod") -> bool:
        """Whether ``other`` is an attempt of the same job of the engine; it may be a living one."""
        return bool(self.process or other.process) and self.instance.job == other.instance.job

    @property
    def described(self) -> str:
        """The host name, with the engine's job or the provider's machine."""
        where = self.instance
        attempt = f", attempt {where.attempt}" if where.attempt else ""
        return f"{self.host or '?'}{f' ({where.provider} {where.id}{attempt})' if where.provider else ''}"


@dataclass(frozen=True, slots=True)
class Claim:
    """One object ``claims/<generation>-<nonce>``; the time is the store's (epoch seconds)."""

    generation: int
    nonce: str
    uploaded_wall: float = 0.0
    writer_id: str = ""


def parse_claim_name(name: str) -> tuple[int, str] | None:
    """(generation, nonce) of an object's name below ``claims/``; None if it is no claim of podwatch's."""
    match = _CLAIM_NAME.match(name)
    return (int(match[1]), match[2]) if match else None


@dataclass(frozen=True, slots=True)
class ClaimDocument(Pod, Document):
    """What the object of a claim contains: who made it."""

    KIND = "podwatch-claim"
    FILE = "claim"

    generation: Whole = 0
    nonce: Label = ""
    created_at: Label = ""


def claim_document(claim: Claim, pod: Pod, created_at: str) -> bytes:
    return _signed(ClaimDocument(generation=claim.generation, nonce=claim.nonce, created_at=created_at), pod).to_bytes()


def claimant(data: bytes | None) -> Pod:
    """The pod that made a claim; one without any name if its document cannot be read."""
    try:
        return ClaimDocument.from_bytes(data or b"")
    except IntegrityError:
        return Pod()


@dataclass(frozen=True, slots=True)
class HeartbeatEnd:
    """A job's verdict."""

    outcome: Label
    exit_code: Integer
    blame: Label
    summary: Annotated[str, shown(2000)]


@dataclass(frozen=True, slots=True)
class Heartbeat(Pod, Document):
    """``heartbeat.json``: what shows from outside the pod whether training makes progress. Times in fields ``_wall``
    are epoch seconds of the pod's clock. Empty texts and None: not known. A wrong figure counts as not known; who wrote
    it, its claim, what is not stored and how the run ended are read as a whole or not at all."""

    KIND = "podwatch-heartbeat"
    FILE = "heartbeat.json"

    generation: Whole = 0
    """Of the claim that this pod holds, as ``claim`` is its nonce."""
    claim: Label = ""
    state: Label = ""
    """A HolderState; a newer podwatch may have others."""
    written_at: Label = ""
    written_wall: Real | None = None
    started_wall: Real | None = None
    podwatch_version: Annotated[Label, unreadable_as("")] = ""
    phase: Label = ""
    desired: Label = ""
    overall: Annotated[Label, unreadable_as("")] = ""
    reason: Annotated[str, shown(300), unreadable_as("")] = ""
    outcome: Annotated[Label, or_null("")] = ""
    """How the run ended on that pod (job/exit_code.py); empty while it continues."""
    end: HeartbeatEnd | None = None
    step: Annotated[Whole | None, unreadable_as(None)] = None
    step_wall: Annotated[Real | None, unreadable_as(None)] = None
    progress_at: Annotated[Label, or_null(""), unreadable_as("")] = ""
    target: Annotated[Whole | None, unreadable_as(None)] = None
    rate: Annotated[Real | None, unreadable_as(None)] = None
    """Steps per hour, by the run's median step."""
    last_stored_step: Whole | None = None
    unstored_step: Whole | None = None
    """The run's newest complete checkpoint on the pod, if the store does not have it. Only the pod can tell: after a
    fresh start a lower step is the newer one."""
    unstored_since_wall: Real | None = None
    """Since when the store has got nothing although a checkpoint waits."""
    best_result: Annotated[str, shown(300), or_null(""), unreadable_as("")] = ""
    account: Annotated[AccountTotals | None, unreadable_as(None)] = None
    """What the run costs so far."""
    last_digest_at: Annotated[Label, or_null(""), unreadable_as("")] = ""
    """When the run's last digest was sent, or when a pod began to wait for the first."""

    @property
    def readable(self) -> bool:
        """Whether it was read: podwatch names itself in every heartbeat."""
        return bool(self.writer_id)

    @property
    def left_as(self) -> str:
        """The state in which its pod left, else the phase."""
        left = self.state != HolderState.RUNNING and self.state in frozenset(HolderState)
        return self.state if left or not self.phase else self.phase

    @property
    def digest_wall(self) -> float | None:
        """Epoch seconds."""
        try:
            found = datetime.fromisoformat(self.last_digest_at)
            return found.timestamp() if found.tzinfo is not None else None
        except (ValueError, OverflowError):
            return None

    def signed(self, pod: Pod, claim: Claim, state: HolderState, written_at: str) -> "Heartbeat":
        """As ``pod``, which holds ``claim``, writes it."""
        return replace(
            _signed(self, pod), generation=claim.generation, claim=claim.nonce, state=str(state), written_at=written_at
        )


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat as read from the store. ``mark`` changes with every write, even if the heartbeat cannot be read.
    ``age``: seconds since it was written, by the store's clock."""

    said: Heartbeat = field(default_factory=Heartbeat)
    mark: str = ""
    age: float = 0.0

    @property
    def step_age(self) -> float | None:
        """Seconds from the last step until it was written."""
        return self._before(self.said.step_wall)

    @property
    def unstored_age(self) -> float | None:
        return self._before(self.said.unstored_since_wall)

    def _before(self, wall: float | None) -> float | None:
        written = self.said.written_wall
        return None if wall is None or written is None else max(0.0, written - wall)


def read_beat(data: bytes | None, age: float = 0.0) -> Beat | None:
    if data is None:
        return None
    try:
        said = Heartbeat.from_bytes(data)
    except IntegrityError:
        said = Heartbeat()
    return Beat(said, hashlib.sha256(data).hexdigest()[:32], max(0.0, age))


def _signed(document: D, pod: Pod) -> D:
    return replace(document, **{one.name: getattr(pod, one.name) for one in fields(Pod)})


@dataclass(frozen=True, slots=True)
class Control(Document):
    """``control.json``: written by operators and the controller; podwatch only reads it.

    ``desired``: for every pod of the run. ``reason`` is shown.
    """

    FILE = "control.json"
    ONLY_KNOWN = True

    desired: Literal["running", "stopped"] = "running"
    reason: Label = ""
    schema_version: Annotated[int, strictly(SCHEMA_VERSION, SCHEMA_VERSION)] = SCHEMA_VERSION
    kind: Literal["podwatch-control"] = "podwatch-control"

    @property
    def stopped(self) -> bool:
        return self.desired == "stopped"


def read_control(data: bytes | None, *, where: str = "control.json") -> Control:
    """Absent means that the pods decide. Raises IntegrityError that names the mistake, because a typing error must not
    count as an absent file."""
    return Control() if data is None else Control.from_bytes(data, where=where)


# -- what a pod does because of them --------------------------------------------------------------------------------


class LeaseAction(StrEnum):
    """What to do next. The values are stable: ``status`` shows them."""

    ASK = "asking"
    """The store has not answered yet."""
    WATCH = "watching"
    CLAIM = "claiming"
    SETTLE = "settling"
    HOLD = "holding"
    REFUSE = "refused"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class Decision:
    """``why_not``: why training must not start now (empty: it can start). ``stop``: running training must stop too.
    ``publish``: this pod is allowed to write to the store. ``generation``: the one to claim, or the one held. ``wait``:
    seconds until the next look. ``holder`` names the other pod. ``trains_in``: seconds until training can start here if
    the other pod stays silent; None if unknown."""

    act: LeaseAction
    why_not: str = ""
    stop: bool = False
    publish: bool = False
    generation: int = 0
    wait: float = 0.0
    at_once: bool = False
    holder: str = ""
    reason: str = ""
    trains_in: float | None = None
    ordered: bool = False
    """control.json orders this run to stop, on every pod."""
