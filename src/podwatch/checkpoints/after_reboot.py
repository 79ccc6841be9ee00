"""Which sets outlived a reboot, and were they looked at since?

Most trainers never sync what they write: after a power loss a file can have its full size and lack its data, which is
only seen by a deeper look (facts/checkpoints.md, end of section 4). So a set that was saved in an earlier boot of this
machine is suspect until it passed one. What passed is kept in the journal; a check after the reboot read the disk, so
it need not be repeated at the next.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

KEY = "checkpoints.boots"


class Memory(Protocol):
    """What outlives podwatch: the journal, or nothing."""

    def learned(self, key: str, default: Any = None) -> Any: ...

    def learn(self, key: str, value: object) -> None: ...


class NoMemory:
    """Forgets everything: for commands that only look."""

    def learned(self, key: str, default: Any = None) -> Any:
        return default

    def learn(self, key: str, value: object) -> None:
        pass


class Recalling:
    """Remembers what was, learns nothing new: a journal opened for reading."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def learned(self, key: str, default: Any = None) -> Any:
        return self._memory.learned(key, default)

    def learn(self, key: str, value: object) -> None:
        pass


def boot_wall() -> float:
    """When this machine was started, in epoch seconds; 0 where /proc does not say (then nothing is suspect by age)."""
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


class Boots:
    """``boot_id`` and ``started`` (epoch seconds) are those of the running kernel.

    Known saves are of three kinds: ``seen`` whole in this boot, seen whole ``before`` it, and ``checked`` after some
    reboot. ``sparse`` are those that had unwritten ranges when they were first found whole: there they mean nothing.
    """

    def __init__(self, memory: Memory, boot_id: str, started: float) -> None:
        self._memory, self._boot_id, self._started = memory, boot_id, started
        kept = memory.learned(KEY, None)
        kept = kept if isinstance(kept, dict) else {}
        self._seen, self._before = _ids(kept, "seen"), _ids(kept, "before")
        self._checked, self._sparse = _ids(kept, "checked"), _ids(kept, "sparse")
        if kept and boot_id and kept.get("boot_id") != boot_id:
            self._before |= self._seen
            self._seen = set()
        self._dirty = False

    def knows(self, save_id: str) -> bool:
        """Was this very save found complete by an earlier podwatch, in whichever boot?"""
        return save_id in self._seen or save_id in self._before or save_id in self._checked

    def suspect(self, save_id: str, changed_wall: float) -> bool:
        """Was it saved before this boot, and not looked at deeper since? ``changed_wall``: its newest ctime."""
        if save_id in self._checked or save_id in self._seen:
            return False
        return save_id in self._before or changed_wall < self._started

    def was_sparse(self, save_id: str) -> bool:
        return save_id in self._sparse

    def passed(self, save_id: str, *, deeper: bool, sparse: bool) -> None:
        """It was found complete; ``deeper`` after being suspect."""
        target = self._checked if deeper else self._seen
        if save_id not in target:
            target.add(save_id)
            self._before.discard(save_id)
            self._dirty = True
        if sparse and save_id not in self._sparse:
            self._sparse.add(save_id)
            self._dirty = True

    def save(self, present: Collection[str]) -> None:
        """Write down what is new; saves that are not ``present`` any more are forgotten then."""
        if not self._dirty:
            return
        here = set(present)
        # Sets that are still to be checked have no save_id among the complete ones yet: ``before`` is kept as it is.
        self._seen &= here
        self._checked &= here
        self._sparse &= here | self._before
        self._memory.learn(
            KEY,
            {
                "boot_id": self._boot_id,
                "seen": sorted(self._seen),
                "before": sorted(self._before)[-5000:],
                "checked": sorted(self._checked),
                "sparse": sorted(self._sparse),
            },
        )
        self._dirty = False


def _ids(kept: dict[str, Any], name: str) -> set[str]:
    value = kept.get(name)
    return {str(x) for x in value} if isinstance(value, list) else set()
