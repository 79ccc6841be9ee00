"""Silent death of the inference engine: its GPU memory is gone, and no process reports an error (docs/detection.md).

vLLM's API server ends with code 0 when its engine dies, and the launcher ignores code 0, so device memory is the
evidence. Memory alone never leads to a restart: a corroborating signal has to agree, and one that cannot be observed
agrees with nothing. Each GPU is judged separately: if one GPU of a tensor-parallel engine is empty, the engine is dead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from podwatch.detection import corroborating_signals as also
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.operator_ends import announcement, operator_wait
from podwatch.detection.windows import NO_RHYTHM, NOT_HELD, Held, Rhythm
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import ProcessRole
from podwatch.domain.snapshot import GpuSample, GpuState, Supervision

SHARED_PART = 0.6
"""On a GPU that the engine shares with a trainer, the engine's memory is gone below this part of the recent level: in
every colocated example vLLM gets 0.4 to 0.9 of the memory, and a trainer's allocator frees less than 0.4 of it between
steps."""
BASELINE_POLLS = 5
"""Observations at or above ``gpu.loaded`` before a baseline is valid (10 s at the default poll)."""
BASELINE_WINDOW = 15
"""The baseline is the highest median over this many observations: spikes shorter than half of it (15 s) are ignored."""
MIN_SAMPLES_BELOW = 3
"""Least observations below the floor, however short ``hold`` is: two could be a transient."""
GAP_SHARE_OF_HOLD = 0.75
"""Longest gap between observations within the window: three polls of 2 s for a hold of 8 s."""
RELOAD_SECONDS = 300.0
"""If podwatch never saw this GPU's memory in use, it assumes that an engine process younger than this is loading."""
CONFIRM_SECONDS = 10.0
"""How long podwatch polls faster after it saw an engine end: ``hold`` plus the time until the first look."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuWatch:
    """One inference GPU. ``level``: recent memory in use (the median of ``recent``). ``baseline_bytes``: the highest
    level."""

    index: int
    recent: tuple[int, ...] = ()
    healthy_polls: int = 0
    baseline_bytes: int = 0
    level: int = 0
    below: Held = NOT_HELD
    value: int = -1
    """The newest observation; below zero before the first."""
    fell_at: float | None = None
    up_at: float | None = None
    """While memory is gone, also across a gap: when it was last seen in use. None if it is in use, or was never seen in
    use by this podwatch."""


@dataclass(frozen=True, slots=True)
class SilentDeathState:
    gpus: tuple[GpuWatch, ...] = ()
    rhythm: Rhythm = NO_RHYTHM
    mig: tuple[int, ...] = ()
    since: float | None = None
    """When memory was first found to be no evidence (sleep mode, MIG)."""
    looks: int = 0

    @property
    def fallen(self) -> bool:
        """Whether the memory of any GPU is gone."""
        return any(watch.below is not NOT_HELD for watch in self.gpus)


class SilentDeathDetector:
    name = "silent-death"
    kinds = (FindingKind.SILENT_DEATH, FindingKind.MEMORY_MAY_FALL, FindingKind.GPU_MIG)
    needs = ("gpus", "trainer")
    second = ("CUDA context", "engine process", "health", "liveness", "steps")
    survives_restart = False

    def initial(self) -> SilentDeathState:
        return SilentDeathState()

    def armed(self, state: SilentDeathState, learned: Learned) -> tuple[str, ...]:
        return tuple(f"silent-death:{name}" for name in learned.seen if name.startswith("gpu"))

    def advance(self, state: SilentDeathState, look: Look) -> DetectorResult[SilentDeathState]:
        policy = look.policies
        if not policy.gpu.inference:
            return DetectorResult(state, look.learned)
        state, learned = _follow_memory(state, look)
        trainer = look.trainer
        if trainer is None or not trainer.alive:
            return DetectorResult(state, learned)
        asleep = also.memory_may_fall(look)
        if asleep or state.mig:
            since = look.snapshot.at if state.since is None else state.since
            state = state if state.since is not None else replace(state, since=since)
            findings = [*_said(asleep, since), *(_mig(index, since) for index in state.mig)]
        else:
            findings = []
        if look.ending or asleep:
            return DetectorResult(state, learned, tuple(findings))
        for watch in state.gpus:
            held = watch.below
            if held.since is None or f"gpu{watch.index}" not in learned.seen:
                continue
            proof = also.seen_to_end(look, held)
            if proof is not None or (held.samples >= MIN_SAMPLES_BELOW and held.seconds >= policy.gpu.hold):
                state, finding = _judge(state, watch, look, learned, proof)
                findings += [finding] if finding is not None else []
        return DetectorResult(state, learned, tuple(findings))


DETECTOR = SilentDeathDetector()


def confirming(state: SilentDeathState, look: Look) -> bool:
    """Whether podwatch should poll faster now, because evidence accumulates that the engine was seen to end
    (``corroborating_signals.seen_to_end``): for at most ``CONFIRM_SECONDS`` after the end of one engine process."""
    trainer, at = look.trainer, look.snapshot.at
    if trainer is None or not trainer.alive or look.ending or trainer.supervision is not Supervision.SUPERVISED:
        return False
    armed = [watch for watch in state.gpus if f"gpu{watch.index}" in look.learned.seen]
    if not armed or also.memory_may_fall(look):
        return False
    if any(m.role is ProcessRole.ENGINE and at - m.at <= CONFIRM_SECONDS for m in look.signals.missed):
        return True
    fell = [watch.fell_at for watch in armed if watch.fell_at is not None]
    return any(at - begin <= CONFIRM_SECONDS and also.dead_in_log(look, begin) for begin in fell)


def _follow_memory(state: SilentDeathState, look: Look) -> tuple[SilentDeathState, Learned]:
    reading, policy, learned = look.snapshot.gpus, look.policies, look.learned
    if not reading.ok or reading.value is None:
        if state.rhythm is NO_RHYTHM:
            return state, learned
        # Blind or pending: no evidence, and every window is interrupted.
        seen = state.rhythm.last_at
        holed = tuple(
            replace(w, below=NOT_HELD, fell_at=None, up_at=w.up_at if w.below is not NOT_HELD else w.up_at or seen)
            for w in state.gpus
        )
        return replace(state, gpus=holed, rhythm=NO_RHYTHM), learned
    if state.rhythm.last_at is not None and reading.at <= state.rhythm.last_at:
        return state, learned
    rhythm = state.rhythm.update(reading.at)
    samples: Mapping[int, GpuSample] = {g.index: g for g in reading.value}
    old = {w.index: w for w in state.gpus}
    watches, mig = [], []
    looks = state.looks + 1
    for index in policy.gpu.inference:
        watch = old.get(index) or GpuWatch(index)
        sample = samples.get(index)
        if sample is not None and sample.mig:
            mig.append(index)
        if sample is None or sample.state is not GpuState.OK or sample.mig or sample.memory_used_bytes is None:
            # Lost, missing or partitioned: no evidence, and the window is interrupted.
            watches.append(watch if watch.below is NOT_HELD else replace(watch, below=NOT_HELD, fell_at=None))
            continue
        before = state.rhythm.last_at if watch.value >= 0 else None
        watch, learned = _observe(watch, sample.memory_used_bytes, reading.at, before, rhythm, look, learned)
        watches.append(watch)
    if looks % BASELINE_WINDOW == 0:
        for watch in watches:
            if watch.level and watch.below is NOT_HELD:
                learned = learned.with_window(watch.index)
    return SilentDeathState(tuple(watches), rhythm, tuple(mig), state.since, looks), learned


def _observe(
    watch: GpuWatch, memory: int, at: float, before: float | None, rhythm: Rhythm, look: Look,
    learned: Learned,
) -> tuple[GpuWatch, Learned]:  # fmt: skip
    policy, index = look.policies, watch.index
    name = f"gpu{index}"
    armed = name in learned.seen
    shared = index in policy.gpu.shared
    if (
        armed
        and not shared
        and watch.below is NOT_HELD
        and memory >= policy.gpu.loaded
        and watch.up_at is None
        and len(watch.recent) == BASELINE_WINDOW
        and memory == watch.value == watch.recent[0]
    ):
        return watch, learned  # the oldest value equals the new one: the median does not change
    below = memory < policy.gpu.floor
    if shared:
        level = watch.level or (learned.baseline(index) or 0 if armed else 0)
        below = below or memory < SHARED_PART * level
    held = NOT_HELD
    if below:
        held = watch.below.update(True, at, rhythm.max_gap(GAP_SHARE_OF_HOLD * policy.gpu.hold))
    up_at = None if not below else watch.up_at if watch.up_at is not None else before
    if below or memory < policy.gpu.loaded:
        polls = watch.healthy_polls if watch.healthy_polls >= BASELINE_POLLS else 0
        return (
            GpuWatch(index, watch.recent, polls, watch.baseline_bytes, watch.level, held, memory, held.since,
                     up_at),
            learned,
        )  # fmt: skip
    recent = (*watch.recent, memory)[-BASELINE_WINDOW:]
    polls = watch.healthy_polls + 1
    baseline, level = watch.baseline_bytes, watch.level
    if polls >= BASELINE_POLLS:
        level = sorted(recent)[len(recent) // 2]
        baseline = max(baseline, level)
        if not armed and ("progress" in learned.seen or "health" in learned.seen):
            # Memory can be full long before the engine works: armed only after another signal was healthy too.
            learned = learned.saw(name)
        if baseline != watch.baseline_bytes:
            learned = learned.with_baseline(index, baseline)
    return (
        GpuWatch(index, recent, polls, baseline, level, held, memory, held.since,
                 up_at),
        learned,
    )  # fmt: skip


def _judge(
    state: SilentDeathState, watch: GpuWatch, look: Look, learned: Learned, proof: Evidence | None
) -> tuple[SilentDeathState, Finding | None]:
    index = watch.index
    policy = look.policies
    shared = index in policy.gpu.shared
    before = watch.level or watch.baseline_bytes or learned.baseline(index) or 0
    value = f"{watch.value / GIB:.2f} GiB, was {before / GIB:.2f} GiB"
    if shared and watch.value >= policy.gpu.floor:
        value += f"; below {SHARED_PART:.0%} of that counts as the engine's death on a shared GPU"
    memory = Evidence(f"gpu{index} memory", value, Agreement.AGREES, watch.below.seconds)
    since = watch.fell_at if watch.fell_at is not None else look.snapshot.at
    engine, steps = also.engine(look, since), also.steps(look, since)
    second = (also.cuda(look, index), engine, also.health(look), also.liveness(look), steps)
    agreeing = also.agreeing(second)
    away = watch.up_at if watch.up_at is not None else look.snapshot.at - RELOAD_SECONDS
    if steps.agreement is not Agreement.AGREES and (new := also.replaced(look, min(away, since))):
        return state, _reloading(index, since, new, (memory, *second, *also.logs(look, "silent-death")))
    if not agreeing:
        works = engine.agreement is Agreement.DISAGREES and steps.agreement is Agreement.DISAGREES
        if shared and works:
            # Another process freed memory and the engine still works: this is the new level.
            fresh = replace(watch, recent=(), level=watch.value, below=NOT_HELD, fell_at=None)
            return replace(state, gpus=tuple(fresh if w is watch else w for w in state.gpus)), None
        return state, _warning(index, since, (memory, *second, *also.logs(look, "silent-death")))
    assert look.trainer is not None
    wait = operator_wait(look.signals.endings, look.snapshot, look.trainer, since)
    how = "died silently" if wait is None else "ended"
    fell = f"memory in use fell from {before / GIB:.1f} to {watch.value / GIB:.1f} GiB"
    finding = Finding(
        FindingKind.SILENT_DEATH,
        Severity.CRITICAL,
        f"the inference engine on GPU {index} {how}: {fell} (confirmed by {', '.join(agreeing)})",
        since,
        suggestion="" if wait is None else announcement(wait),
        verdict=Verdict.RESTART,
        confirmed=wait is None,
        evidence=(memory, *((proof,) if proof is not None else ()), *second, *also.logs(look, "silent-death")),
        subject=f"gpu{index}",
    )
    return state, finding


def _reloading(index: int, since: float, new: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        FindingKind.SILENT_DEATH,
        Severity.WARNING,
        f"GPU {index} lost the inference engine's memory, and {new} was started since: the inference engine is loading"
        " again",
        since,
        suggestion="podwatch waits while the new engine loads, and restarts training if no step is made for too long",
        evidence=evidence,
        subject=f"gpu{index}",
    )


def _warning(index: int, since: float, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        FindingKind.SILENT_DEATH,
        Severity.WARNING,
        f"GPU {index} lost the inference engine's memory, but no corroborating signal confirms a death: podwatch does"
        " not restart training",
        since,
        suggestion="check the inference log; set [inference] urls so that podwatch also checks the server's /health",
        evidence=evidence,
        subject=f"gpu{index}",
    )


def _said(asleep: str, since: float) -> list[Finding]:
    if not asleep:
        return []
    return [
        Finding(
            FindingKind.MEMORY_MAY_FALL,
            Severity.INFO,
            f"sleep mode can free the memory of the inference GPUs ({asleep}), so podwatch does not detect a silent"
            " death by memory",
            since,
            suggestion='the other signals still count; to judge by memory anyway, set [inference] sleep = "no"',
            evidence=(Evidence("sleep mode", asleep, Agreement.UNAVAILABLE),),
        )
    ]


def _mig(index: int, since: float) -> Finding:
    return Finding(
        FindingKind.GPU_MIG,
        Severity.WARNING,
        f"GPU {index} is partitioned (MIG), and its memory does not show a single instance: podwatch cannot detect a"
        " silent death there by memory",
        since,
        suggestion="set [inference] urls so that podwatch checks the engine's /health instead",
        evidence=(Evidence(f"gpu{index} memory", "MIG is on", Agreement.UNAVAILABLE),),
        subject=f"gpu{index}",
    )
