"""What the store keeps of a run for its next attempt: the last verdict, how often attempts failed, bad hosts.

One small object, ``verdict.json``, because an engine starts the next attempt with an empty disk. Times are epoch
seconds of the store's clock. Data from a store is never trusted: parsing drops what is not what it should be.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from podwatch.domain.document import SCHEMA_VERSION
from podwatch.domain.engine_and_attempt import NO_INSTANCE, Instance, parse_instance
from podwatch.domain.safe_names import deceives

LONGEST_TEXT = 1000
MOST_HOSTS, MOST_GPUS = 64, 16
"""Bad hosts kept, newest first, and GPUs of one of them; a machine has 16 GPUs at most."""


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as it can be recognised again. ``node``: the engine's name of it. ``gpus``: UUIDs of the run's GPUs."""

    machine: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()

    def same_as(self, other: "Host") -> bool:
        """Whether both are the same machine, by the best that both know: a GPU of both, then the engine's name, then
        the machine id, which the containers of one image can share."""
        if self.gpus and other.gpus:
            return not set(self.gpus).isdisjoint(other.gpus)
        if self.node and other.node:
            return self.node == other.node
        return bool(self.machine) and self.machine == other.machine


@dataclass(frozen=True, slots=True)
class BadHost:
    """A machine on which this run failed by a fault of the machine. ``refusals``: starts refused there since then."""

    host: Host
    reason: str
    since_wall: float
    until_wall: float
    refusals: int = 0


@dataclass(frozen=True, slots=True)
class Suspect:
    """A machine whose faults could all pass. ``faults``: attempts in a row that ended by one."""

    host: Host
    faults: int


@dataclass(frozen=True, slots=True)
class LastEnd:
    """How the last attempt ended. ``outcome``, ``blame``: of policy/exit_code.py. ``step``: its newest step."""

    code: int
    outcome: str
    reason: str
    blame: str
    wall: float
    step: int | None = None
    host: str = ""
    instance: Instance = NO_INSTANCE


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """An attempt that started training and has not ended as far as the store shows. ``id``: its process. ``progress``:
    it made progress, so that its end counts as no failure even if it leaves no verdict."""

    id: str
    wall: float
    host: str = ""
    progress: bool = False


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """``digest``: of the command and configuration that everything but ``bad_hosts`` is about. ``failures``: attempts
    in a row that ended by a failure and made no step above ``best_step``; ``first_failure_wall``: the end of the first
    of them. ``lineage``: the one that ``best_step`` belongs to. ``retried``: the engine's job whose ``--retry`` was
    carried out. ``suspect``: of a run over several nodes."""

    digest: str = ""
    last: LastEnd | None = None
    failures: int = 0
    first_failure_wall: float | None = None
    not_before_wall: float | None = None
    best_step: int | None = None
    lineage: str = ""
    attempt: OpenAttempt | None = None
    bad_hosts: tuple[BadHost, ...] = ()
    retried: str = ""
    suspect: Suspect | None = None


def verdict_document(kept: RunVerdict, *, run_id: str, written_at: str) -> bytes:
    document = {
        "schema_version": SCHEMA_VERSION,
        "kind": "podwatch-verdict",
        "run_id": run_id,
        "written_at": written_at,
    }
    return (json.dumps({**document, **asdict(kept)}, indent=1, sort_keys=True) + "\n").encode()


def parse_verdict(data: bytes | None) -> RunVerdict:
    """What ``verdict_document`` wrote; an empty one for what cannot be parsed: an attempt then starts."""
    try:
        document = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        return RunVerdict()
    if not isinstance(document, dict) or document.get("kind") != "podwatch-verdict":
        return RunVerdict()
    hosts = document.get("bad_hosts")
    found = [_bad_host(one) for one in hosts[:MOST_HOSTS]] if isinstance(hosts, list) else []
    return RunVerdict(
        digest=_text(document, "digest"),
        last=_last(document.get("last")),
        failures=_count(document, "failures"),
        first_failure_wall=_wall(document, "first_failure_wall"),
        not_before_wall=_wall(document, "not_before_wall"),
        best_step=_step(document, "best_step"),
        lineage=_text(document, "lineage"),
        attempt=_attempt(document.get("attempt")),
        bad_hosts=tuple(host for host in found if host is not None),
        retried=_text(document, "retried"),
        suspect=_suspect(document.get("suspect")),
    )


def _last(value: object) -> LastEnd | None:
    if not isinstance(value, Mapping) or type(value.get("code")) is not int:
        return None
    wall = _wall(value, "wall")
    texts = {name: _text(value, name) for name in ("outcome", "reason", "blame", "host")}
    instance = parse_instance(value.get("instance"))
    return LastEnd(code=value["code"], wall=wall or 0.0, step=_step(value, "step"), instance=instance, **texts)


def _attempt(value: object) -> OpenAttempt | None:
    if not isinstance(value, Mapping) or not _text(value, "id"):
        return None
    progress = value.get("progress") is True
    return OpenAttempt(_text(value, "id"), _wall(value, "wall") or 0.0, _text(value, "host"), progress)


def parse_host(value: object) -> Host:
    """A machine as ``asdict`` wrote it; every field that is not what it should be is left out."""
    if not isinstance(value, Mapping):
        return Host()
    gpus = value.get("gpus")
    known = [gpu for gpu in gpus[:MOST_GPUS] if isinstance(gpu, str) and gpu] if isinstance(gpus, list) else []
    return Host(_text(value, "machine"), _text(value, "node"), tuple(known))


def _bad_host(value: object) -> BadHost | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("host"), Mapping):
        return None
    until = _wall(value, "until_wall")
    if until is None:
        return None
    return BadHost(
        parse_host(value["host"]),
        _text(value, "reason"),
        _wall(value, "since_wall") or 0.0,
        until,
        _count(value, "refusals"),
    )


def _suspect(value: object) -> Suspect | None:
    if not isinstance(value, Mapping) or not _count(value, "faults"):
        return None
    return Suspect(parse_host(value.get("host")), _count(value, "faults"))


def _text(document: Mapping[str, Any], key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) and len(value) <= LONGEST_TEXT and not deceives(value) else ""


def _wall(document: Mapping[str, Any], key: str) -> float | None:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**53:  # nor NaN
        return None
    return float(value)


def _count(document: Mapping[str, Any], key: str) -> int:
    value = document.get(key)
    return value if type(value) is int and 0 <= value < 2**31 else 0


def _step(document: Mapping[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if type(value) is int and 0 <= value < 10**18 else None


KEYS = frozenset(field.name for field in fields(RunVerdict))
"""Of the document, beside its own description. What they mean for a job: docs/runs.md."""
