"""Which pod holds a run in the store: pods, claims, the holder's heartbeat, and control.json (docs/two-pods.md). Data
from a store is never trusted: parsing refuses or drops it."""

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from podwatch.domain.document import SCHEMA_VERSION
from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance, parse_instance
from podwatch.domain.errors import IntegrityError
from podwatch.domain.manifest import valid_save_id
from podwatch.domain.safe_names import deceives
from podwatch.domain.stored_checkpoint import KnownSaves, PublishedSave

_CLAIM_NAME = re.compile(r"(\d{1,18})-([A-Za-z0-9]{1,64})\Z")
_CONTROL_KEYS = ("schema_version", "kind", "desired", "holder", "reason")


LAST_DIGEST, PINS, SAVES = "last_digest_at", "pins", "saves"
"""Fields of heartbeat.json."""
MOST_PINS = 100
"""Pins in a heartbeat: of the highest steps."""
MOST_WALL = 1e11
"""Epoch seconds of year 5138: a larger time is none."""
MOST_SAVES = 300
"""Saves in a heartbeat: the newest. Older ones are mostly milestones, which stay anyway."""
CLAIM_WAIT_SECONDS = 100.0
"""From a claim to its decision: longer than a PUT's timeout plus 30 s, so that every rival claim is visible; and longer
than confirmation plus PUT, so that the last pointer of a living former holder arrives before the first one of ours."""
PATIENCE_SECONDS = 300.0
"""How old another pod's heartbeat must be before its run is taken over. It is written every minute, and B2 can be slow
or down for a while."""
REFUSAL_SECONDS = 60.0
"""A permanent refusal of the store lasts this long before it counts: all of B2's servers know a new bucket or key well
within this time."""


class HolderState(StrEnum):
    """``state`` in heartbeat.json. PREEMPTED and RELEASED mean that the pod trains no more and no pod waits for it."""

    RUNNING = "running"
    RESTARTING = "restarting"
    PREEMPTED = "preempted"
    RELEASED = "released"


GONE = frozenset({HolderState.PREEMPTED, HolderState.RELEASED})


@dataclass(frozen=True, slots=True)
class Pod:
    """The identity of a pod. ``writer_id`` is kept in podwatch's state directory; ``machine`` survives a reboot,
    ``boot`` does not; ``place`` identifies the output directory, whose lock allows one trainer on a machine.

    ``process``: the process that is the engine's job (``ProcessIdentity.text``); empty unless podwatch runs as a job.
    """

    writer_id: str
    machine: str = ""
    boot: str = ""
    place: str = ""
    host: str = ""
    instance: Instance = NO_INSTANCE
    process: str = ""

    def same_as(self, other: "Pod") -> bool:
        """Whether ``other`` is certainly this pod, so that its claims cannot come from a second living one: the same
        state on the same machine (a machine has one boot at a time), or the same boot and place with the state lost.

        Not for jobs: an engine starts a job again on the machine, with the state directory, where the attempt before
        may live on. Of a job only the same process is certainly this pod (see ``same_job``)."""
        if self.process or other.process:
            return self.process == other.process
        if self.writer_id == other.writer_id:
            return other.machine in ("", self.machine)
        here = (self.machine, self.boot, self.place)
        return all(here) and here == (other.machine, other.boot, other.place)

    def same_job(self, other: "Pod") -> bool:
        """Whether ``other`` is an attempt of the same job of the engine; it may be a living one."""
        return bool(self.process or other.process) and self.instance.job == other.instance.job

    def called(self, name: str) -> bool:
        """Whether ``name`` (host name, writer id, machine id, the instance's id or its label) names this pod."""
        return bool(name) and name in (self.host, self.writer_id, self.machine, self.instance.id, self.instance.label)


@dataclass(frozen=True, slots=True)
class Claim:
    """One object ``claims/<generation>-<nonce>``; the time is the store's (epoch seconds)."""

    generation: int
    nonce: str
    uploaded_wall: float = 0.0
    file_id: str = ""
    writer_id: str = ""


def parse_claim_name(name: str) -> tuple[int, str] | None:
    """(generation, nonce) of an object's name below ``claims/``; None if it is no claim of podwatch's."""
    match = _CLAIM_NAME.match(name)
    return (int(match[1]), match[2]) if match else None


def claim_document(claim: Claim, pod: Pod, created_at: str) -> bytes:
    document = {"schema_version": SCHEMA_VERSION, "kind": "podwatch-claim", **_signature(pod)}
    return _json({**document, "generation": claim.generation, "nonce": claim.nonce, "created_at": created_at})


def claimant(data: bytes | None) -> tuple[Pod, str]:
    """(pod, nonce) of a claim's document; empty if it cannot be parsed."""
    document = _object(data)
    return _pod(document), _text(document, "nonce")


@dataclass(frozen=True, slots=True)
class Sign:
    """A heartbeat as read from the store. ``mark`` changes with every write, even if nothing else can be parsed."""

    mark: str
    pod: Pod
    generation: int = 0
    nonce: str = ""
    state: str = ""
    digest_wall: float | None = None
    """When the run's last digest was sent, or when a pod began to wait for the first; epoch seconds."""
    pins: Mapping[int, str] = field(default_factory=dict)
    """Step: reason. The pod that replaces this one adopts them, so that it does not delete these steps in the store."""
    saves: KnownSaves | None = None
    """None: this pod does not know what it would hand over, or not which of it is pinned."""
    account: Mapping[str, Any] = field(default_factory=dict)
    """What the run costs so far, as it stands in the heartbeat."""


def parse_sign(data: bytes | None) -> Sign | None:
    if data is None:
        return None
    document = _object(data)
    generation = document.get("generation")
    return Sign(
        mark=hashlib.sha256(data).hexdigest()[:32],
        pod=_pod(document),
        generation=generation if type(generation) is int and 0 <= generation < 2**62 else 0,
        nonce=_text(document, "claim"),
        state=_text(document, "state"),
        digest_wall=_time(document, LAST_DIGEST),
        pins=parse_pins(document),
        saves=parse_saves(document),
        account=account if isinstance(account := document.get("account"), dict) else {},
    )


def pins_field(pins: Mapping[int, str]) -> list[dict[str, object]]:
    """``pins`` (step: reason) as heartbeat.json has them."""
    return [{"step": step, "reason": pins[step][:200]} for step in sorted(pins)[-MOST_PINS:]]


def parse_pins(document: Mapping[str, Any]) -> dict[int, str]:
    """The pins (step: reason) in a heartbeat; without what is none."""
    listed = document.get(PINS)
    entries = [entry for entry in listed[:MOST_PINS] if isinstance(entry, dict)] if isinstance(listed, list) else []
    steps = [(entry.get("step"), _text(entry, "reason")) for entry in entries]
    return {step: reason for step, reason in steps if type(step) is int and 0 <= step < 2**62}


def saves_field(known: KnownSaves) -> dict[str, object]:
    """``known`` as heartbeat.json has it."""
    listed = [
        {
            "step": s.step,
            "save_id": s.save_id,
            "lineage": s.lineage,
            "generation": s.generation,
            "seq": s.seq,
            "stored_wall": round(s.wall, 3),
            "total_bytes": s.total_bytes,
        }
        for s in known.saves[-MOST_SAVES:]
    ]
    return {"generation": known.generation, "seq": known.seq, "known": listed}


def parse_saves(document: Mapping[str, Any]) -> KnownSaves | None:
    """The saves in a heartbeat; None if there are none, or if any of it is wrong, because podwatch deletes by it."""
    field = document.get(SAVES)
    if not isinstance(field, dict) or not isinstance(field.get("known"), list):
        return None
    saves = tuple(_known_save(entry) for entry in field["known"][:MOST_SAVES] if isinstance(entry, dict))
    generation, seq = (_number(field, key) for key in ("generation", "seq"))
    whole = tuple(save for save in saves if save is not None)
    if len(whole) != len(field["known"]) or not whole or not generation or not seq:
        return None
    if any(save.seq > seq or save.generation > generation for save in whole):
        return None
    return KnownSaves(generation, seq, whole)


def _known_save(entry: Mapping[str, Any]) -> PublishedSave | None:
    step, generation, seq, size = (_number(entry, key) for key in ("step", "generation", "seq", "total_bytes"))
    wall, save_id = entry.get("stored_wall"), _text(entry, "save_id")
    if step is None or size is None or not generation or not seq or not valid_save_id(save_id):
        return None
    if not isinstance(wall, int | float) or isinstance(wall, bool) or not 0 < wall < MOST_WALL:
        return None
    return PublishedSave(step, save_id, _text(entry, "lineage"), generation, seq, "", "", "", 0, size, float(wall))


def _number(document: Mapping[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if type(value) is int and 0 <= value < 2**62 else None


def sign_document(pod: Pod, claim: Claim, fields: Mapping[str, object]) -> bytes:
    """heartbeat.json. ``fields`` are JSON-safe."""
    return _json(
        {
            **fields,
            "schema_version": SCHEMA_VERSION,
            "kind": "podwatch-heartbeat",
            **_signature(pod),
            "generation": claim.generation,
            "claim": claim.nonce,
        }
    )


@dataclass(frozen=True, slots=True)
class Control:
    """``control.json``: written by operators and the controller; podwatch only reads it.

    ``desired``: "running" or "stopped", for every pod of the run. ``holder``: the only pod allowed to hold the run (its
    host name, writer id or machine id as in heartbeat.json); empty: any pod that claims it. ``reason`` is shown.
    """

    desired: str = "running"
    holder: str = ""
    reason: str = ""

    @property
    def stopped(self) -> bool:
        return self.desired == "stopped"


def parse_control(data: bytes | None, *, where: str = "control.json") -> Control:
    """Parse control.json; absent means that the pods decide. Raises IntegrityError that names the mistake, because a
    typing error must not count as an absent file."""
    if data is None:
        return Control()
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("control.json is not valid JSON", where=where, fix="correct or delete it") from error
    if not isinstance(document, dict):
        raise IntegrityError("control.json is not a JSON object", where=where, fix='write {"desired": "stopped"}')
    for key in document:
        if key not in _CONTROL_KEYS:
            raise IntegrityError(
                f"control.json has an unknown entry {key[:40]!r}", where=where, fix="known: " + ", ".join(_CONTROL_KEYS)
            )
    if document.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
        raise IntegrityError("control.json has an unknown schema_version", where=where, fix=f"write {SCHEMA_VERSION}")
    if document.get("kind", "podwatch-control") != "podwatch-control":
        raise IntegrityError("control.json has another `kind`", where=where, fix="remove `kind`")
    desired = document.get("desired", "running")
    if desired not in ("running", "stopped"):
        raise IntegrityError(
            f"control.json has an invalid `desired` {str(desired)[:40]!r}",
            where=where,
            fix='write "running" or "stopped"',
        )
    texts = {key: document.get(key, "") for key in ("holder", "reason")}
    for key, value in texts.items():
        if not isinstance(value, str) or len(value) > 200 or deceives(value):
            raise IntegrityError(
                f"invalid `{key}` in control.json", where=where, fix="write plain text of at most 200 characters"
            )
    return Control(desired=desired, **texts)


def _signature(pod: Pod) -> dict[str, object]:
    said = asdict(pod)
    said["instance"] = said["instance"] if pod.instance != NO_INSTANCE else None
    return {"machine_id": said.pop("machine"), "boot_id": said.pop("boot"), **said}


def _pod(document: Mapping[str, Any]) -> Pod:
    return Pod(
        writer_id=_text(document, "writer_id"),
        machine=_text(document, "machine_id"),
        boot=_text(document, "boot_id"),
        place=_text(document, "place"),
        host=_text(document, "host"),
        instance=parse_instance(document.get("instance")),
        process=_text(document, "process"),
    )


def _object(data: bytes | None) -> dict[str, Any]:
    try:
        document = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) and len(value) <= 200 and not deceives(value) else ""


def _time(document: Mapping[str, Any], key: str) -> float | None:
    """Epoch seconds of an RFC 3339 time in UTC; None for anything else."""
    with contextlib.suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(_text(document, key))
        return found.timestamp() if found.tzinfo is not None else None
    return None


def _json(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
