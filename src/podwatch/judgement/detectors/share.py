"""The engine's own part of a GPU that a trainer shares: by how much must its memory fall to be a death?

NVML's memory per process would tell, but in containers it names host pids, or none (facts/prime-rl.md section 5). So,
best first: what earlier deaths and start-ups of this run showed; ``--gpu-memory-utilization`` on the engine's command
line; a fixed part of what the GPU holds.
"""

from dataclasses import dataclass

from podwatch.domain.snapshot import GpuSample
from podwatch.judgement.detectors.base import Look
from podwatch.judgement.learned import Learned

LEARNED_PART = 0.8
"""Part of a learned share that must be gone: the rest is for a trainer that grew meanwhile."""
CONFIGURED_PART = 0.7
"""The same of ``--gpu-memory-utilization`` x total, which vLLM fills up to, but not always to the brim."""
FIXED_PART = 0.4
"""Of the whole, where nothing is known: vLLM is given 0.4 to 0.9 of the memory in every colocated example, and a
trainer's allocator gives back less than this between steps."""
LEAST_SHARE = 1 << 30


@dataclass(frozen=True, slots=True)
class Rise:
    """The memory's rise between the engine's first sight and its first healthy answer. ``before`` is None until then;
    ``spoiled``: somebody else took memory of the GPU meanwhile, or may have."""

    before: int | None = None
    spoiled: bool = False
    done: bool = False


NO_RISE = Rise()


def follow_rise(
    rise: Rise, index: int, memory: int, memory_before: int, look: Look, learned: Learned
) -> tuple[Rise, Learned]:
    """One observation. The share is learned once per start, and only if the engine was alone on the GPU until it was
    ready: prime-rl often starts both together, and then the rise belongs to both."""
    if rise.done:
        return rise, learned
    tree = look.signals.tree
    if rise.before is None:
        if not tree.engines:
            return rise, learned
        unknown = memory_before < 0  # the engine was there at the very first look
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
    """The fall in bytes that is a death, and where that number comes from."""
    share = learned.share(index)
    if share:
        return int(share * LEARNED_PART), f"learned from {learned.shares_seen(index)}"
    if configured is not None and sample.memory_total_bytes:
        drop = int(configured * sample.memory_total_bytes * CONFIGURED_PART)
        if drop < level:
            return drop, f"--gpu-memory-utilization {configured:g}"
    return int(level * FIXED_PART), f"{FIXED_PART:.0%} of what it held"
