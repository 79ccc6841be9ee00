"""What recovery must remember over its own death: kept in the journal under ``recovery.*``.

Losing it (a rebuilt journal) only delays giving up and makes old mistakes possible once more; the run record beside
output_dir is enough to go on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from podwatch.journal import AsyncJournal, Journal
from podwatch.judgement.restart import RestartHistory
from podwatch.recovery.state import text_map
from podwatch.system.clock import Clock
from podwatch.system.identity import boot_id


@dataclass
class Memory:
    """``history`` counts in monotonic seconds of this boot. ``gpu_base`` maps an NVML index to the bytes that were used
    before our trainer started. ``counted`` and ``confirmed`` are the start ids last counted as a failure and last
    confirmed. ``ancestry`` maps older lineages to the last step that still belongs to this line."""

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
    """What a person asked the next start to be; forgotten once it has happened."""
    next_try_wall: float | None = None
    adopted: bool = False
    """A person took the sets that were here before podwatch (--adopt-existing)."""
    yielded: bool = False
    """This pod has lost the run and stopped its trainer: one that is attached to since then is a person's."""
    ended_wall: float | None = None
    """Epoch second at which our last trainer ended: what had been running before that is not its successor."""
    by_hand: str = ""
    """Id of the last `podwatch run` on a terminal that was obeyed: an init that restarts the daemon is not typed."""
    ignored: tuple[str, ...] = ()
    """Start ids of processes that an operator said are not this run's training (``podwatch start --beside PID``)."""

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
        # Memory that was used before a reboot says nothing about now.
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
    )


def _age(data: Mapping[str, Any], clock: Clock) -> float:
    """Seconds since it was saved, as the wall clock tells; never negative."""
    return max(0.0, clock.wall() - float(data.get("wall", clock.wall())))


def shift(history: RestartHistory, by: float) -> RestartHistory:
    """Move every time of it, from the monotonic clock of one boot to that of another."""
    moved = {
        name: value + by
        for name in ("streak_started_at", "working_since", "last_step_at", "gave_up_at")
        if (value := getattr(history, name)) is not None
    }
    return replace(history, **moved)


KEY = "recovery.memory"


def joined(known: object, ours: object) -> object:
    """Of what the database remembers and what was remembered without knowing it: the database's, but a start that was
    made since is not made a second time."""
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
