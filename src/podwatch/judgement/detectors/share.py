"""The inference engine's share of a GPU that it shares with a trainer: how far must memory fall to be a death?

NVML's memory per process would answer this, but in containers it shows host pids, or none. Instead, best first: what
earlier deaths and start-ups of this run showed; ``--gpu-memory-utilization`` on the engine's command line; a fixed part
of the memory in use.
"""

from dataclasses import dataclass

from podwatch.domain.snapshot import GpuSample
from podwatch.judgement.detectors.base import Look
from podwatch.judgement.learned import Learned

LEARNED_PART = 0.8
"""Part of a learned share that must be gone: the trainer's memory may have grown meanwhile."""
CONFIGURED_PART = 0.7
"""The same for ``--gpu-memory-utilization`` x total, which vLLM does not always use fully."""
FIXED_PART = 0.4
"""Part of the memory in use, if nothing else is known: in every colocated example vLLM gets 0.4 to 0.9 of the memory,
and a trainer's allocator frees less than this between steps."""
LEAST_SHARE = 1 << 30


@dataclass(frozen=True, slots=True)
class Rise:
    """The rise of memory between the first sight of the engine and its first healthy answer. ``before``: bytes in use
    before the engine, None until it is seen. ``spoiled``: another process took memory meanwhile, or may have."""

    before: int | None = None
    spoiled: bool = False
    done: bool = False


NO_RISE = Rise()


def follow_rise(
    rise: Rise, index: int, memory: int, memory_before: int, look: Look, learned: Learned
) -> tuple[Rise, Learned]:
    """Take one observation. The share is learned once per start, and only if no trainer used the GPU until the engine
    was ready: prime-rl often starts both together, and then the rise includes both."""
    if rise.done:
        return rise, learned
    tree = look.signals.tree
    if rise.before is None:
        if not tree.engines:
            return rise, learned
        unknown = memory_before < 0  # the engine existed at the first look
        return Rise(memory_before, spoiled=unknown or index in tree.trainer_gpus, done=unknown), learned
    if tree.blind or index in tree.trainer_gpus or not tree.engines:
        return Rise(rise.before, spoiled=True, done=True), learned
    if "health" not in learned.seen:
        return rise, learned
    share = memory - rise.before
    if not rise.spoiled and share >= LEAST_SHARE:
        learned = learned.with_share(index, share)
    return Rise(rise.before, rise.spoiled, done=True), learned


def share_of(learned: Learned, index: int, configured: float | None, sample: GpuSample, level: int) -> tuple[int, str]:
    """The fall in bytes that counts as a death, and the source of that number."""
    share = learned.share(index)
    if share:
        return int(share * LEARNED_PART), f"learned from {learned.shares_seen(index)}"
    if configured is not None and sample.memory_total_bytes:
        drop = int(configured * sample.memory_total_bytes * CONFIGURED_PART)
        if drop < level:
            return drop, f"--gpu-memory-utilization {configured:g}"
    return int(level * FIXED_PART), f"{FIXED_PART:.0%} of the memory in use"
