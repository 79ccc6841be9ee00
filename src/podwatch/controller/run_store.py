"""What the controller reads and writes of one run in the store.

    controller.json               written by people: caps, pause, order of providers
    controller/rules.json         the last controller.json that could be read: its caps hold while a new one cannot
    controller/pods/<n>.json      one record for each machine, written before it is requested
    controller/claims/<n>-<nonce> which of two controllers requests machine n, as the lease's claims
    controller/journal/<time>-<nonce>.json   each decision that differs from the one before

Blocks; for one thread. Everything raises RemoteError if the store does not answer: the controller then does nothing.
"""

import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, Protocol

from podwatch.domain.earlier_attempts import parse_verdict
from podwatch.domain.errors import ExitCode, IntegrityError, RemoteError
from podwatch.domain.lease import (
    CLAIM_WAIT_SECONDS,
    Beat,
    Claim,
    Control,
    Heartbeat,
    parse_claim_name,
    read_beat,
    read_control,
)
from podwatch.domain.manifest import Keys
from podwatch.domain.replacement import (
    Listing,
    Record,
    Rules,
    joined,
    parse_record,
    parse_rules,
    record_document,
    store_tag,
)
from podwatch.policy.rented_machines import Facts, is_stale
from podwatch.policy.who_holds_the_run import CONFIRMED_SECONDS, winner
from podwatch.stores.base import ObjectStore, StoredObject, store_time
from podwatch.stores.fenced_writes import put_before
from podwatch.stores.part_reader import StreamSource

SMALL = 1 << 20
WATCH_GAP_SECONDS = 150.0
"""Between two complete looks that watch one heartbeat. In a longer gap the store may have been away."""
AMEND_ATTEMPTS = 5
EXCLUSIVE_NAME = "only"
"""Where names are exclusive, all claims of a number have this same name, as those of the lease."""


class ControllerClock(Protocol):
    def wall(self) -> float: ...
    def boottime(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SentClaim:
    """A claim that was sent: without an answer it can be in the store, now or later."""

    generation: int
    nonce: str
    data: bytes
    at: float


@dataclass(frozen=True, slots=True)
class OwnClaim:
    """``at``: boottime just before it was sent; ``took``: seconds until the store had answered."""

    claim: Claim
    at: float
    took: float


class RunStore:
    """One run. ``wait``: seconds from a claim until no other can come before it."""

    def __init__(
        self, store: ObjectStore, keys: Keys, clock: ControllerClock, *, wait: float = CLAIM_WAIT_SECONDS
    ) -> None:
        self._store, self._keys, self._clock, self._wait = store, keys, clock, wait
        self._tag = store_tag(" ".join((store.url, getattr(store, "service", ""), keys.prefix)))
        self._records: dict[str, tuple[StoredObject, Record]] = {}
        self._control: StoredObject | None = None
        self._own: OwnClaim | None = None
        self._sent: SentClaim | None = None
        self._watch: tuple[str, float, float] | None = None
        """The heartbeat's mark, and the boottime of the first and the last look that saw it so."""
        self._journaled: Mapping[str, object] | None = None
        self._valid: bytes | None = None
        """The last controller.json that could be read."""
        self._kept: bytes | None = None
        """That one in the store, as far as this process knows."""

    @property
    def url(self) -> str:
        return self._store.url

    def now(self) -> float:
        """The store's clock; only right after an answer of the store."""
        return store_time(self._store, self._clock.wall())

    # -- reading ------------------------------------------------------------------------------------------------------

    def facts(self, lists: Mapping[str, Listing | str]) -> Facts:
        """Everything but the records. ``lists``: as just asked."""
        at = self._clock.boottime()
        beat = self._any_size(self._keys.heartbeat)
        rules, control, problem = self._from_people()
        kept = None if rules is not None else self._kept_rules()
        claims, claimed = self._claims(self._keys.controller + "claims/"), self._claims(self._keys.claims)
        self._find_sent(claims)
        latest = self._any_size(self._keys.latest)
        pointer = _generation(latest[1] if latest is not None else None)
        now = self.now()
        heard = None if beat is None else read_beat(beat[1], now - beat[0].uploaded_wall)
        newest = max((c.uploaded_wall for c in claimed), default=None)
        own = self._own
        return Facts(
            now,
            self._keys.run_id,
            lists,
            rules,
            control,
            problem,
            heard,
            lease=max([pointer, heard.said.generation if heard else 0, *(c.generation for c in claimed)]),
            claim_age=None if newest is None else max(0.0, now - newest),
            end_code=self._end_code(heard),
            claims=tuple(claims),
            own=own.claim if own is not None else None,
            own_age=self._own_age(own) if own is not None else 0.0,
            outdated=heard is not None and any(c.generation > heard.said.generation for c in claimed),
            watched=self._watched(heard.mark if heard is not None else "", at),
            tag=self._tag,
            # Two machines can have different directories at the same path.
            proves=not self._store.url.startswith("file:"),
            kept=kept,
        )

    def _watched(self, mark: str, at: float) -> float:
        """Seconds for which every look has seen this heartbeat; ``at``: boottime just before it was read."""
        since, last = self._watch[1:] if self._watch is not None and self._watch[0] == mark else (at, at)
        since = at if at - last > WATCH_GAP_SECONDS else since
        self._watch = mark, since, at
        return at - since

    def _from_people(self) -> tuple[Rules | None, Control | None, str]:
        rules = control = None
        problem = ""
        try:
            data = self._store.get_bytes(self._keys.controller_rules, limit=SMALL)
            rules = parse_rules(data)
            self._valid = data
        except IntegrityError as error:
            problem = str(error)
        try:
            found = self._store.read(self._keys.control, limit=SMALL)
            self._control = found[0] if found is not None else None
            control = read_control(found[1] if found is not None else None)
        except IntegrityError as error:
            problem = problem or str(error)
        return rules, control, problem

    def _kept_rules(self) -> Rules | None:
        with contextlib.suppress(IntegrityError):
            if self._valid is None:
                self._valid = self._kept = self._store.get_bytes(f"{self._keys.controller}rules.json", limit=SMALL)
            return parse_rules(self._valid)
        return None

    def keep_rules(self) -> None:
        """Keep the controller.json that was read, for a process that finds one that it cannot read."""
        key = f"{self._keys.controller}rules.json"
        if self._valid is None or self._valid == self._kept:
            return
        if self._store.get_bytes(key, limit=SMALL) != self._valid:
            self._store.put_bytes(key, self._valid)
        self._kept = self._valid

    def _any_size(self, key: str) -> tuple[StoredObject, bytes] | None:
        """One that is too large counts as one that cannot be read: it must not stop what bounds the costs."""
        try:
            return self._store.read(key, limit=SMALL)
        except IntegrityError:
            there = self._store.stat(key)
            return None if there is None else (there, b"")

    def _claims(self, prefix: str) -> list[Claim]:
        found = []
        for item in self._store.identify(self._store.list(prefix)):
            name = parse_claim_name(item.key.removeprefix(prefix))
            if name is not None and (item.ours or self._store.exclusive):
                found.append(Claim(*name, item.uploaded_wall, item.file_id, item.writer_id))
        return found

    def _end_code(self, heard: Beat | None) -> int | None:
        """The exit code of a run that ended for good, by the heartbeat, else by the last attempt's verdict."""
        said = heard.said if heard is not None else Heartbeat()
        if "finished" in (said.desired, said.outcome):
            return int(ExitCode.OK)
        if said.end is not None and said.end.exit_code == ExitCode.DO_NOT_RUN:
            return said.end.exit_code
        verdict = self._any_size(self._keys.verdict)
        last = parse_verdict(verdict[1] if verdict is not None else None)
        if last.last is None or last.last.code != ExitCode.DO_NOT_RUN:
            return None
        if last.attempt is not None:  # foretold: it still stores its last data, while it lives
            gone = heard is None or is_stale(heard)
            return int(ExitCode.DO_NOT_RUN) if gone and last.last.wall >= last.attempt.wall else None
        return int(ExitCode.DO_NOT_RUN)

    def records(self) -> tuple[Record, ...]:
        """In order of their numbers. Only what changed is read again. Raises IntegrityError for one that cannot be
        read: it could hide a machine that costs money."""
        prefix, found = self._keys.controller + "pods/", {}
        for item in self._store.list(prefix):
            if item.ours is False or not item.key.endswith(".json"):
                continue
            known = self._records.get(item.key)
            if known is not None and item.file_id and known[0].file_id == item.file_id:
                found[item.key] = known
            else:
                data = self._store.get_bytes(item.key, limit=SMALL)
                found[item.key] = (item, parse_record(data, self._keys.run_id, where=item.key))
        for key in self._records.keys() - found.keys():  # a listing that leaves one out would forget its cost
            data = self._store.get_bytes(key, limit=SMALL)
            if data is not None:
                found[key] = (self._records[key][0], parse_record(data, self._keys.run_id, where=key))
        self._records = found
        return tuple(sorted((record for _, record in found.values()), key=lambda r: r.generation))

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, record: Record, *, until: float = math.inf) -> None:
        """``until``: boottime after which nothing may be sent any more. Raises TooLate."""
        data = record_document(record, self._keys.run_id)
        put_before(self._store, self._key(record), data, until, self._clock)

    def _key(self, record: Record) -> str:
        return f"{self._keys.controller}pods/{record.generation}.json"

    def amend(self, record: Record, base: Record) -> None:
        """Write what became of ``base``, with what other controllers have written meanwhile."""
        key = self._key(record)
        for _ in range(AMEND_ATTEMPTS):
            there = self._store.read(key, limit=SMALL)
            theirs = base if there is None else parse_record(there[1], self._keys.run_id, where=key)
            whole = record if theirs == base else joined(record, theirs, base)
            if not self._store.conditional:  # what a race loses here, the next look finds again in the lists
                self.write(whole)
                return
            data = record_document(whole, self._keys.run_id)
            if self._store.replace(key, StreamSource(BytesIO(data)), len(data), there[0] if there else None):
                return
        raise RemoteError("other controllers changed a record at every attempt", where=key)

    def update(self, before: tuple[Record, ...], after: tuple[Record, ...]) -> None:
        """Write those that a look changed in more than the times of what was seen."""
        known = {record.generation: record for record in before}
        for record in after:
            old = known.get(record.generation)
            if old == record:
                continue
            if old is None:
                self.write(record)
            elif _lasting(old) != _lasting(record) or _aged(old, record):
                self.amend(record, old)

    def write_control(self, control: Control) -> None:
        """Replace control.json if it is still what was read, where the store can tell; else at once."""
        document = {key: value for key, value in _control(control).items() if value}
        data = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
        if self._store.conditional:
            self._store.replace(self._keys.control, StreamSource(BytesIO(data)), len(data), self._control)
        elif _same(self._store.stat(self._keys.control), self._control):
            self._store.put_bytes(self._keys.control, data)

    def journal(self, entry: Mapping[str, Any]) -> None:
        """Write a decision, unless it repeats the last one of this process, or, at its first look, the last one of this
        day by any. Numbers in its reason may differ."""
        kind, at = _kind(entry), datetime.fromtimestamp(self.now(), UTC)
        if self._journaled is None:
            self._journaled = self._last_of(f"{self._keys.controller}journal/{at.strftime('%Y%m%d')}")
        if kind == self._journaled:
            return
        name = f"{self._keys.controller}journal/{at.strftime('%Y%m%dT%H%M%SZ')}-{secrets.token_hex(4)}.json"
        document = {"schema_version": 1, "kind": "podwatch-controller-decision", "run_id": self._keys.run_id}
        document |= {"at": at.strftime("%Y-%m-%dT%H:%M:%SZ"), **entry}
        self._store.put_bytes(name, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
        self._journaled = kind

    def _last_of(self, prefix: str) -> Mapping[str, object] | None:
        last = max((item.key for item in self._store.list(prefix)), default="")
        return _kind(_object(self._store.get_bytes(last, limit=SMALL))) if last else None

    # -- which controller ---------------------------------------------------------------------------------------------

    def claim(self, generation: int) -> bool:
        """Claim that this controller requests machine ``generation``; False if another one has."""
        exclusive, at = self._store.exclusive, self._clock.boottime()
        nonce = EXCLUSIVE_NAME if exclusive else secrets.token_hex(8)
        key = f"{self._keys.controller}claims/{generation}-{nonce}"
        document = {"schema_version": 1, "kind": "podwatch-controller-claim", "nonce": secrets.token_hex(8)}
        data = (json.dumps(document) + "\n").encode()  # no two are equal: a repeated `create` compares the bytes
        self._sent = SentClaim(generation, nonce, data, at)
        stored = self._store.create(key, data) if exclusive else self._store.put_bytes(key, data)
        self._sent = None
        if stored is None:
            return False
        claim = Claim(generation, nonce, stored.uploaded_wall, stored.file_id, stored.writer_id)
        self._own = OwnClaim(claim, at, self._clock.boottime() - at)
        return True

    def _find_sent(self, claims: list[Claim]) -> None:
        """Find the claim whose answer was lost, so that it does not count as another controller's."""
        sent = self._sent
        if sent is None:
            return
        found = next((c for c in claims if (c.generation, c.nonce) == (sent.generation, sent.nonce)), None)
        if found is None:
            return  # it can still arrive
        self._sent = None
        key = f"{self._keys.controller}claims/{sent.generation}-{sent.nonce}"
        if not self._store.exclusive or self._store.get_bytes(key, limit=SMALL) == sent.data:
            self._own = OwnClaim(found, sent.at, self._clock.boottime() - sent.at)

    def _own_age(self, own: OwnClaim) -> float:
        """Seconds since the claim was sent; one that was known too late to count is as old as can be."""
        late = not self._store.exclusive and own.took > self._wait / 2
        return math.inf if late else self._clock.boottime() - own.at

    @property
    def claimed(self) -> int:
        """The number of this controller's last claim; 0 without one."""
        return self._own.claim.generation if self._own is not None else 0

    def left_to_wait(self) -> float:
        """Seconds until this controller's claim can be decided; 0: now."""
        if self._own is None or self._store.exclusive:
            return 0.0
        return max(0.0, self._own.at + self._wait - self._clock.boottime())

    def decided(self) -> bool:
        """Whether no claim can come before this controller's any more. A late one never counts."""
        own = self._own
        return own is not None and self.left_to_wait() <= 0 and (self._store.exclusive or own.took <= self._wait / 2)

    def won(self) -> tuple[bool, float]:
        """(whether this controller's claim is the first of the highest number, boottime until which that holds)."""
        began = self._clock.boottime()
        first, own = winner(self._claims(self._keys.controller + "claims/")), self._own
        ours = own is not None and first is not None and first.nonce == own.claim.nonce
        ours = ours and own is not None and first is not None and first.generation == own.claim.generation
        return bool(ours) and self.decided(), began + CONFIRMED_SECONDS

    def drop_claim(self) -> None:
        self._own = None


def _kind(entry: Mapping[str, Any]) -> Mapping[str, object]:
    """What makes two entries of the journal the same decision."""
    kind = {key: entry.get(key) for key in ("action", "provider", "id", "label", "result")}
    return {**kind, "reason": "".join(c for c in str(entry.get("reason", "")) if not c.isdigit())}


def _object(data: bytes | None) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(data or b"")
        if isinstance(document, dict):
            return document
    return {}


def _generation(data: bytes | None) -> int:
    found = _object(data).get("generation")
    return found if type(found) is int and 0 <= found < 2**62 else 0


def _lasting(record: Record) -> Record:
    """The record without what changes at every look."""
    billed = tuple(replace(one, seen=None if one.seen is None else 0.0) for one in record.billed)
    return replace(record, billed=billed, alive_at=None, last_step=None)


def _aged(old: Record, new: Record) -> bool:
    """Whether the last heartbeat in the store is so old that it must be written again."""
    return (new.alive_at or 0.0) - (old.alive_at or 0.0) >= 240.0


def _control(control: Control) -> dict[str, str]:
    return {"desired": control.desired, "holder": control.holder, "reason": control.reason}


def _same(there: StoredObject | None, read: StoredObject | None) -> bool:
    if there is None or read is None:
        return there is read
    return (there.file_id, there.uploaded_wall, there.size) == (read.file_id, read.uploaded_wall, read.size)
