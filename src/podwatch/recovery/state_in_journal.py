"""Recovery's durable state, kept in the journal under ``recovery.*``.

Losing it (a rebuilt journal) only delays giving up and allows old mistakes once more; the run record beside output_dir
is enough to continue.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.restart import RestartHistory
from podwatch.recovery.state import text_map
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id


@dataclass
class Memory:
    """``history`` counts in monotonic seconds of this boot. ``gpu_base`` maps an NVML index to the bytes in use before
    our trainer started. ``counted`` and ``confirmed`` are the start ids last counted as a failure and last
    confirmed. ``ancestry`` maps older lineages to their last step that belongs to the current lineage."""

    history: RestartHistory = field(default_factory=RestartHistory)
    refused: dict[int, str] = field(default_factory=dict)
    gpu_base: dict[int, int] = field(default_factory=dict)
    ancestry: dict[str, int] = field(default_factory=dict)
    counted: str = ""
    confirmed: str = ""
    below: int | None = None
    """The next start must come from a step below this one (a step back that was decided)."""
    wanted: int | None = None
    fresh: bool = False
    """With ``wanted``: the next start as the operator requested it; cleared once it has happened."""
    next_try_wall: float | None = None
    adopted: bool = False
    """The operator adopted the checkpoints that existed before podwatch (--adopt-existing)."""
    yielded: bool = False
    """This pod lost the run and stopped its trainer; a trainer attached since then belongs to the operator."""
    ended_wall: float | None = None
    """Epoch second at which our last trainer ended; a process that already ran then is not its successor."""
    by_hand: str = ""
    """Id of the last `podwatch run` typed on a terminal; it counts once, not again when an init restarts the daemon."""
    ignored: tuple[str, ...] = ()
    """Start ids of processes that the operator declared not to be this run's training (``podwatch start --beside
    PID``)."""
    kept: str = ""
    """Start id of the trainer whose stop the operator cancelled: no finding stops it again."""
    asked: str = ""
    """Start id of the trainer that the operator asked to stop: the stop is carried out in mode observe, too."""

    def to_dict(self, clock: Clock) -> dict[str, object]:
        return {
            "history": self.history.to_dict(),
            "monotonic": clock.monotonic(),
            "wall": clock.wall(),
            "boot": boot_id(),
            "refused": {str(k): v for k, v in self.refused.items()},
            "gpu_base": {str(k): v for k, v in self.gpu_base.items()},
            "ancestry": self.ancestry,
            "counted": self.counted,
            "confirmed": self.confirmed,
            "below": self.below,
            "wanted": self.wanted,
            "fresh": self.fresh,
            "next_try_wall": self.next_try_wall,
            "adopted": self.adopted,
            "yielded": self.yielded,
            "ended_wall": self.ended_wall,
            "by_hand": self.by_hand,
            "ignored": list(self.ignored),
            "kept": self.kept,
            "asked": self.asked,
        }


def from_dict(data: Mapping[str, Any], clock: Clock) -> Memory:
    history = RestartHistory.from_dict(data.get("history") or {})
    same_boot = data.get("boot") == boot_id() and float(data.get("monotonic", 0.0)) <= clock.monotonic()
    if not same_boot:
        history = shift(history, clock.monotonic() - float(data.get("monotonic", 0.0)) - _age(data, clock))
    base = text_map(data.get("gpu_base"))
    return Memory(
        history=history,
        refused=text_map(data.get("refused")),
        # GPU memory in use before a reboot says nothing about now.
        gpu_base={index: int(float(value)) for index, value in base.items()} if same_boot else {},
        ancestry={str(k): int(v) for k, v in (data.get("ancestry") or {}).items()},
        counted=str(data.get("counted", "")),
        confirmed=str(data.get("confirmed", "")),
        below=data.get("below"),
        wanted=data.get("wanted"),
        fresh=bool(data.get("fresh", False)),
        next_try_wall=data.get("next_try_wall"),
        adopted=bool(data.get("adopted", False)),
        yielded=bool(data.get("yielded", False)),
        ended_wall=data.get("ended_wall") if same_boot else None,
        by_hand=str(data.get("by_hand", "")),
        ignored=tuple(str(name) for name in data.get("ignored") or ()) if same_boot else (),
        kept=str(data.get("kept", "")),
        asked=str(data.get("asked", "")),
    )


def _age(data: Mapping[str, Any], clock: Clock) -> float:
    """Return the wall-clock seconds since ``data`` was saved; never negative."""
    return max(0.0, clock.wall() - float(data.get("wall", clock.wall())))


def shift(history: RestartHistory, by: float) -> RestartHistory:
    """Return ``history`` with every time moved from the monotonic clock of one boot to that of another."""
    moved = {
        name: value + by
        for name in ("streak_started_at", "working_since", "last_step_at", "gave_up_at")
        if (value := getattr(history, name)) is not None
    }
    return replace(history, **moved)


KEY = "recovery.memory"


def joined(known: object, ours: object) -> object:
    """Merge the database's memory (``known``) with the one kept while the database could not be read (``ours``). The
    database's wins, except that a start made meanwhile is not repeated."""
    if not isinstance(known, dict) or not isinstance(ours, dict):
        return known if isinstance(known, dict) else ours
    kept = {**known, "next_try_wall": ours.get("next_try_wall")}
    for name in ("counted", "confirmed"):
        kept[name] = ours.get(name) or known.get(name, "")
    if ours.get("confirmed") and ours.get("confirmed") != known.get("confirmed"):
        kept.update(wanted=None, fresh=False)
    return kept


async def load(journal: AsyncJournal, clock: Clock) -> Memory:
    data = await journal.run(Journal.learned, KEY)
    try:
        return from_dict(data, clock) if isinstance(data, dict) else Memory()
    except (TypeError, ValueError):
        return Memory()


async def save(journal: AsyncJournal, clock: Clock, memory: Memory) -> None:
    await journal.run(Journal.learn, KEY, memory.to_dict(clock))
