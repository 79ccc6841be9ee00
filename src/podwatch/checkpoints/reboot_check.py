"""Which checkpoints are from before a reboot, and whether they were checked since.

Most trainers never fsync what they write: after a power loss a file can have its full size and lack its data, which
only a deeper check sees. So a checkpoint that was saved in an earlier boot of this machine is suspect until it passed
one. The journal keeps which ones passed; a check after a reboot read the disk, so it is not repeated after the next.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

KEY = "checkpoints.boots"


class Memory(Protocol):
    """State that outlives podwatch: the journal, or nothing."""

    def learned(self, key: str, default: Any = None) -> Any: ...

    def learn(self, key: str, value: object) -> None: ...


class NoMemory:
    """Forgets everything: for commands that only look."""

    def learned(self, key: str, default: Any = None) -> Any:
        return default

    def learn(self, key: str, value: object) -> None:
        pass


class Recalling:
    """Returns what was saved and saves nothing: a journal opened for reading."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def learned(self, key: str, default: Any = None) -> Any:
        return self._memory.learned(key, default)

    def learn(self, key: str, value: object) -> None:
        pass


def boot_wall() -> float:
    """When this machine was started, in epoch seconds; 0 where /proc does not show it (then nothing is suspect by
    age)."""
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0.0


class RebootCheck:
    """``boot_id`` and ``started`` (epoch seconds) are those of the running kernel.

    Known saves are of three kinds: ``seen`` complete in this boot, seen complete ``before`` it, and ``checked`` after a
    reboot. ``sparse`` are those that had unwritten ranges when they were first found complete: for them such ranges
    prove nothing.
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
        """Whether an earlier podwatch found this save complete, in any boot."""
        return save_id in self._seen or save_id in self._before or save_id in self._checked

    def suspect(self, save_id: str, changed_wall: float) -> bool:
        """Whether it was saved before this boot and not checked more deeply since. ``changed_wall``: its newest
        ctime."""
        if save_id in self._checked or save_id in self._seen:
            return False
        return save_id in self._before or changed_wall < self._started

    def was_sparse(self, save_id: str) -> bool:
        return save_id in self._sparse

    def passed(self, save_id: str, *, deeper: bool, sparse: bool) -> None:
        """Record that it was found complete; ``deeper``: by the check of a suspect checkpoint."""
        target = self._checked if deeper else self._seen
        if save_id not in target:
            target.add(save_id)
            self._before.discard(save_id)
            self._dirty = True
        if sparse and save_id not in self._sparse:
            self._sparse.add(save_id)
            self._dirty = True

    def save(self, present: Collection[str]) -> None:
        """Save what is new, and forget saves that are not ``present`` any more."""
        if not self._dirty:
            return
        here = set(present)
        # Checkpoints that are not checked yet have no save_id among the complete ones: ``before`` is kept as it is.
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
