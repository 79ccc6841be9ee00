"""Logs, incident bundles and configuration of a run in the store, for when the pod itself is gone. Blocking.

The caller has removed the secrets from what it passes. Only names of ours are replaced or deleted: one segment below
``logs/``, ``incidents/`` or ``config/``.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from podwatch.domain.errors import RemoteError
from podwatch.store.keys import Kind, RunKeys
from podwatch.store.objects.base import ObjectInfo, Objects

KEEP = {"config": 50, "logs": 24, "incidents": 60}
"""How many of the newest objects of each kind stay: three pods' logs, two pods' bundles."""
READ = ("archived.json", "bootstrap.json", "controller.json")
"""Documents below ``config/`` that are read as long as the run exists, however old they are."""
KEEP_SECONDS = 90 * 86400.0
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Evidence:
    """``kind``: one of ``KEEP``. ``fixed``: what has this name never changes."""

    kind: str
    name: str
    data: bytes
    fixed: bool = True


def plain_name(text: str) -> str:
    """One segment of letters, digits, dots and dashes; never hidden or empty; the end of a long name, which says more
    than its beginning."""
    return _PLAIN.sub("_", text).lstrip(".")[-150:].lstrip(".") or "unnamed"


def configuration(name: str, text: str) -> Evidence:
    """A configuration file under a name that its content decides, so that each version stays."""
    data = text.encode()
    return Evidence("config", f"{hashlib.sha256(data).hexdigest()[:12]}-{plain_name(name)}", data)


@dataclass(slots=True)
class EvidenceKeeper:
    """``sent``: digests of what this life stored, so that an unchanged log is not sent again."""

    store: Objects
    keys: RunKeys
    sent: dict[str, bytes] = field(default_factory=dict)
    _there: set[str] | None = None

    def put(self, found: Iterable[Evidence]) -> int:
        """How many objects were sent. Raises RemoteError."""
        count = 0
        for one in found:
            key = self.keys.evidence(one.kind) + plain_name(one.name)
            digest = hashlib.sha256(one.data).digest()
            if self.sent.get(key) == digest or (one.fixed and key in self._known()):
                continue
            self.store.put(key, one.data)
            self.sent[key] = digest
            self._known().add(key)
            count += 1
        return count

    def tidy(self, needed: Collection[str] = ()) -> int:
        """Delete all but the newest of each kind, and what is old; how many. ``needed``: names that stay, besides
        ``READ``. Of what stays only the newest version does. A key that cannot delete is no error."""
        try:
            return sum(self._tidy(kind, {*needed, *READ}) for kind in KEEP)
        except RemoteError as error:
            if error.transient:
                raise
            return 0

    def _tidy(self, kind: str, needed: Collection[str]) -> int:
        items = list(self.store.list(self.keys.evidence(kind)))
        now = max((item.wall for item in items), default=0.0)
        stale = [key for key in stale_evidence(items, now, KEEP[kind]) if key.rpartition("/")[2] not in needed]
        own = [item.key for item in items if self.keys.parse(item.key).kind is Kind.EVIDENCE]
        old = [key for key in own if key in stale]
        self.store.delete(old)
        self.store.delete([key for key in own if key not in stale], older=True)
        return len(old)

    def _known(self) -> set[str]:
        if self._there is None:
            self._there = {item.key for kind in KEEP for item in self.store.list(self.keys.evidence(kind))}
        return self._there


def stale_evidence(items: Iterable[ObjectInfo], now: float, most: int) -> list[str]:
    """All but the newest ``most``, and those older than ``KEEP_SECONDS``. The newest always stays."""
    ordered = sorted(items, key=lambda item: (-item.wall, item.key))
    return [i.key for n, i in enumerate(ordered) if n >= max(1, most) or (n and now - i.wall > KEEP_SECONDS)]
