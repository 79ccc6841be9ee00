"""Turns the readings of one turn into windows. Each reading is taken once; one that could not be made is no evidence.

``Learned.seen`` collects the names of the windows that were armed in this start, so that a podwatch that was restarted
knows them. Once podwatch has seen a step, ``settled`` is added, with ``needs:engine`` and ``needs:inference`` if such a
process existed: the end of a server that the run starts later, for one evaluation, is normal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from podwatch.config.settings import GpuSettings, Policies
from podwatch.detection.learned import Learned
from podwatch.detection.progress import follow
from podwatch.detection.start import (
    CONTEXTS,
    ENGINE_ROLES,
    ROLE,
    Level,
    Life,
    Machine,
    Saves,
    Server,
    Start,
    Tree,
)
from podwatch.detection.window import Pace
from podwatch.domain.process import ProcessRole, ProcessSample
from podwatch.domain.snapshot import (
    GpuSample,
    GpuState,
    Health,
    InferenceSample,
    Liveness,
    Snapshot,
    TrainerSample,
)

LASTING_SECONDS = 32.0
"""The end of a process that lived for less (or less than four times ``hold``) is no evidence: loading a model takes
longer, and a fork has its parent's name until it calls exec or ends."""
SETTLE_SECONDS = 60.0
"""A step this long after the first reading shows which processes training needs: by then all were found."""
LIVES_LISTED = 64
DEAD = frozenset("ZXx")
"""States in /proc/PID/stat of a process that has ended."""
ROLES = frozenset({ProcessRole.INFERENCE, ProcessRole.ENGINE, ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER})
SHARED_PART = 0.6
"""On a GPU that the engine shares with a trainer, the engine's memory is gone below this part of the recent level: in
every colocated example vLLM gets 0.4 to 0.9 of the memory, and a trainer's allocator frees less than 0.4 of it between
steps."""
LEVEL_POLLS = 5
"""Readings in use before a level is valid (10 s at the default poll)."""
LEVEL_READINGS = 15
"""The level is the median of so many readings: a spike shorter than half of them (15 s) is ignored."""
GAP_SHARE_OF_HOLD = 0.75
"""Longest gap between two readings of GPU memory in one window: three polls of 2 s for a hold of 8 s."""
IDLE_PERCENT = 5.0
REMEMBERED = ("gpu", "cuda", "health:", "liveness:", "tokens:")
OOMS_LISTED = 8


@dataclass(slots=True)
class Turn:
    """One turn: the snapshot, and what is remembered. The input of every rule.

    ``trainer``: its process tree, None if it could not be observed. ``wanted``: the desired state is ``running``.
    ``ending``: training is finishing or being stopped, so the end of its processes is expected.
    """

    snapshot: Snapshot
    policies: Policies
    start: Start
    machine: Machine
    learned: Learned
    trainer: TrainerSample | None = None
    wanted: bool = True
    ending: bool = False

    @property
    def at(self) -> float:
        return self.snapshot.at

    @property
    def trains(self) -> bool:
        """False while training is stopped or ending, and between two starts: an engine that is shut down writes the
        same log lines as one that dies."""
        between = self.trainer is not None and not self.trainer.start_id
        return self.wanted and not self.ending and not between

    def saw(self, *names: str) -> None:
        if any(name not in self.learned.seen for name in names):
            self.learned = self.learned.saw(*names)

    def needs(self, role: str) -> bool:
        """Whether training needs this role; False for an engine or server that came after the first steps."""
        return role not in ENGINE_ROLES or "settled" not in self.learned.seen or f"needs:{role}" in self.learned.seen

    def is_extra(self, server: InferenceSample) -> bool:
        """Whether training made steps before this server was found: its tokens are evidence of work, its end is
        none."""
        seen = self.learned.seen
        return server.discovered and "settled" in seen and f"health:{server.url}" not in seen


def lasting_seconds(policy: GpuSettings) -> float:
    """Seconds that an engine or server process must have lived for its end to be evidence."""
    return min(4.0 * policy.hold, LASTING_SECONDS)


# -- progress and saves ------------------------------------------------------------------------------------------------


def observe_progress(turn: Turn) -> None:
    start, snapshot = turn.start, turn.snapshot
    start.progress, turn.learned = follow(
        start.progress, snapshot.progress, at=snapshot.at, saving=snapshot.saving, learned=turn.learned
    )
    if start.progress.newest_at is not None:
        turn.saw("progress")
    first, newest = start.first_reading, start.progress.numbered_at
    if first is not None and newest is not None and newest >= first + SETTLE_SECONDS:
        roles = {life.role for life in start.lives.values()} & ENGINE_ROLES
        if "settled" not in turn.learned.seen:
            turn.saw("settled", *(f"needs:{role}" for role in roles))


def observe_saves(turn: Turn) -> None:
    """A higher step is a new save. A lower one is a step back or a deletion and teaches nothing about the interval."""
    newest, saves = turn.snapshot.checkpoint, turn.start.saves
    if newest.newest_step is None or newest.newest_step == saves.step:
        return
    age = turn.snapshot.wall - newest.newest_wall if newest.newest_wall is not None else 0.0
    at = turn.at - max(0.0, age)
    higher = saves.step is not None and newest.newest_step > saves.step
    if saves.at is not None and higher:
        at = max(saves.at, at)
        if saves.whole and at > saves.at:
            turn.learned = turn.learned.with_save_gap(at - saves.at)
    turn.start.saves = Saves(newest.newest_step, at, higher)


# -- processes ---------------------------------------------------------------------------------------------------------


def observe_processes(turn: Turn) -> None:
    start, reading, trainer = turn.start, turn.snapshot.trainer, turn.trainer
    if trainer is None or reading.at <= start.read_at or not (trainer.alive or trainer.exit is not None):
        return
    at = start.read_at = reading.at
    if start.first_reading is None:
        start.first_reading = at
    living = [p for p in trainer.descendants if p.state not in DEAD]
    _observe_lives(turn, living, at)
    _observe_roles(start, living, at)
    _observe_others(turn, living, at)
    if trainer.alive:
        _observe_contexts(turn, living, at)
    engines = [life for life in start.lives.values() if life.role is ProcessRole.ENGINE and life.ended_at is None]
    if any(life.seconds >= lasting_seconds(turn.policies.gpu) for life in engines):
        turn.saw("engine")


def _observe_lives(turn: Turn, living: Iterable[ProcessSample], at: float) -> None:
    lives = turn.start.lives
    boottime = boottime_of(turn.snapshot, at)
    found = {p.identity: p for p in living}
    for identity, life in list(lives.items()):
        process = found.get(identity)
        if process is not None and process.role is not life.role:
            del lives[identity]  # it exec'd another program
        elif process is None and life.ended_at is None:
            lives[identity] = replace(life, ended_at=at)
    for identity, process in found.items():
        if process.role in ROLES:
            known = lives.get(identity)
            if known is not None and known.ended_at is None:
                lives[identity] = replace(known, last=at)
            else:
                born = None if boottime is None else at - identity.age(boottime)
                lives[identity] = Life(identity, process.role, process.name, born, at, at)
    if len(lives) > LIVES_LISTED:
        ended = sorted((life for life in lives.values() if life.ended_at is not None), key=lambda life: life.last)
        for life in ended[: len(lives) - LIVES_LISTED]:
            del lives[life.identity]


def boottime_of(snapshot: Snapshot, at: float) -> float | None:
    """The monotonic time ``at`` on CLOCK_BOOTTIME; None if unknown."""
    return snapshot.boot_at - (snapshot.at - at) if snapshot.boot_at is not None else None


def _observe_roles(start: Start, living: Iterable[ProcessSample], at: float) -> None:
    """A role is gone when no process of it is left: forks, replacements and single workers do not count."""
    present = frozenset(name for process in living for name in _names(process))
    known = {name.removeprefix(ROLE) for name in start.windows if name.startswith(ROLE)}
    for name in present | known:
        # A process seen at a single reading can be a fork that had its parent's name.
        start.watch(f"{ROLE}{name}", name in present, at, arms=name in start.present)
    start.present = present


def _observe_others(turn: Turn, living: Iterable[ProcessSample], at: float) -> None:
    """Helpers of the engine and its server end with them, and say nothing of the rest of the run."""
    start, boottime = turn.start, boottime_of(turn.snapshot, at)
    if boottime is None:
        return
    found = {p.identity: p for p in living}
    if start.others - found.keys():
        start.other_ended = at
    engine = {p.identity.pid for p in living if p.role in ENGINE_ROLES}
    least = lasting_seconds(turn.policies.gpu)
    start.others = frozenset(
        p.identity
        for p in living
        if p.role not in ENGINE_ROLES and p.parent_pid not in engine and p.identity.age(boottime) >= least
    )


def _names(process: ProcessSample) -> tuple[str, ...]:
    """The roles of a process. A trainer without a recognized name is known by its CUDA contexts."""
    names = (str(process.role),) if process.role in ROLES else ()
    return (*names, CONTEXTS) if process.cuda and process.role not in ENGINE_ROLES else names


def _observe_contexts(turn: Turn, living: Iterable[ProcessSample], at: float) -> None:
    start, policy = turn.start, turn.policies
    if not start.minors and turn.snapshot.gpus.ok and turn.snapshot.gpus.value:
        gpus = turn.snapshot.gpus.value
        found = {g.minor: g.index for g in gpus if g.minor is not None}
        start.minors = found if len(found) == len(gpus) else {}
    ours: set[int] = set()
    theirs: set[int] = set()
    blind = blind_engine = False
    for process in living:
        engine = process.role in ENGINE_ROLES
        if engine and "--" in process.command:
            start.sleeps = start.sleeps or _has_flag(process.command, "--enable-sleep-mode")
        if process.cuda is None:
            blind, blind_engine = True, blind_engine or engine
        elif process.cuda:
            (ours if engine else theirs).update(_devices(process, start.minors))
    start.tree = Tree(frozenset(theirs), frozenset(ours), blind)
    for index in policy.gpu.inference:
        shared = index in policy.gpu.shared
        open_now = index in ours or (not shared and index in theirs)
        unknown = blind_engine if shared else blind
        # On a shared GPU only the engine's contexts count, and only of an engine that training needs.
        arms = not shared or turn.needs(ProcessRole.ENGINE)
        start.watch(f"cuda{index}", True if open_now else None if unknown else False, at, arms=arms)


def _devices(process: ProcessSample, minors: dict[int, int]) -> Iterable[int]:
    """NVML indices of the GPUs that ``process`` has open."""
    return [minors[n] for n in process.gpus if n in minors] if minors else process.gpus


def _has_flag(command: str, flag: str) -> bool:
    """Whether the flag is set; vLLM accepts ``_`` for ``-``."""
    for word in command.split():
        name, _, value = word.partition("=")
        if name.replace("_", "-") == flag and value.lower() not in ("false", "0", "no"):
            return True
    return False


# -- GPUs --------------------------------------------------------------------------------------------------------------


def observe_gpus(turn: Turn) -> None:
    start, reading = turn.start, turn.snapshot.gpus
    at = reading.at
    if not reading.ok or reading.value is None:
        for name, window in start.windows.items():
            if name.startswith(("gpu", "idle", "trainer-gpus")):
                start.windows[name] = window.observe(None, max(at, turn.at))
        start.idle_unknown = start.idle_unknown or reading.detail or "not observed"
        start.paces.pop("gpus", None)
        return
    pace = start.paces["gpus"] = start.paces.get("gpus", UNPACED).observe(at)
    samples = {g.index: g for g in reading.value}
    short = pace.gap(GAP_SHARE_OF_HOLD * turn.policies.gpu.hold)
    start.mig = frozenset(i for i in turn.policies.gpu.inference if i in samples and samples[i].mig)
    for index in turn.policies.gpu.inference:
        _observe_memory(turn, index, _memory(samples.get(index)), at, short)
    _observe_use(turn, reading.value, at, pace.gap())
    _observe_own_gpus(turn, samples, at, short)


UNPACED = Pace()


def _memory(sample: GpuSample | None) -> int | None:
    """Bytes in use; None for a GPU that is lost, missing or partitioned: no evidence."""
    if sample is None or sample.state is not GpuState.OK or sample.mig:
        return None
    return sample.memory_used_bytes


def _observe_memory(turn: Turn, index: int, memory: int | None, at: float, gap: float) -> None:
    start, policy, name = turn.start, turn.policies.gpu, f"gpu{index}"
    if memory is None or at <= (start.of(name).last or float("-inf")):
        start.watch(name, None, max(at, start.of(name).last or at))
        return
    found = start.levels.get(index, Level())
    armed = start.of(name).armed
    below = memory < policy.floor
    if index in policy.shared:
        level = found.level or (turn.learned.baseline(index) or 0 if armed else 0)
        below = below or memory < SHARED_PART * level
    if below or memory < policy.loaded:
        polls = found.polls if found.polls >= LEVEL_POLLS else 0
        used_at = found.used_at if below else at
        start.levels[index] = replace(found, polls=polls, value=memory, used_at=used_at)
        start.watch(name, not below, at, gap, arms=False)
        return
    recent = (*found.recent, memory)[-LEVEL_READINGS:]
    polls, level = found.polls + 1, found.level
    if polls >= LEVEL_POLLS:
        level = sorted(recent)[len(recent) // 2]
    highest = max(found.highest, level)
    start.levels[index] = Level(recent, polls, level, highest, memory, at)
    if highest != found.highest:
        turn.learned = turn.learned.with_baseline(index, highest)
    # Memory can be full long before the engine works: armed only after another signal was healthy too.
    servers = any(window.armed for name, window in start.windows.items() if name.startswith("health:"))
    works = servers or "progress" in turn.learned.seen
    start.watch(name, True, at, gap, arms=works and polls >= LEVEL_POLLS)


def run_gpus(turn: Turn) -> frozenset[int]:
    """NVML indices of this run's GPUs; empty if unknown, and then all GPUs of the pod count.

    If only the inference GPUs are configured, the trainer's are read from the process tree, but only if the tree also
    shows the engine's GPUs correctly: in a container the device numbers in /proc can be the host's.
    """
    policy, tree = turn.policies, turn.start.tree
    inference = frozenset(policy.gpu.inference)
    if policy.gpu.trainer:
        return inference | frozenset(policy.gpu.trainer)
    if tree.trainer_gpus and inference <= (tree.engine_gpus | tree.trainer_gpus) and not tree.blind:
        return inference | tree.trainer_gpus | tree.engine_gpus
    return frozenset()


def _observe_use(turn: Turn, gpus: Iterable[GpuSample], at: float, gap: float) -> None:
    """A device that always reports 0 % proves nothing: idle counts once the GPUs of this run were seen busy."""
    start, ours = turn.start, run_gpus(turn)
    mine = [g for g in gpus if not ours or g.index in ours]
    unknown = [g.index for g in mine if g.state is not GpuState.OK or g.utilization_percent is None or g.mig]
    if unknown or not mine or len(mine) < len(ours):
        start.idle_unknown = (
            f"not reported by GPU {unknown[0]}" if unknown else "NVML does not list every GPU of this run"
        )
        start.windows["idle"] = start.of("idle").reset()
        return
    start.idle_unknown = ""
    busy = max(g.utilization_percent or 0.0 for g in mine) >= IDLE_PERCENT
    if busy and not turn.learned.utilization_works:
        turn.learned = replace(turn.learned, utilization_works=True)
    start.watch("idle", busy, at, gap)
    if turn.learned.utilization_works and not start.of("idle").armed:
        start.windows["idle"] = replace(start.of("idle"), armed=True)


def _observe_own_gpus(turn: Turn, samples: dict[int, GpuSample], at: float, gap: float) -> None:
    """The memory of the GPUs that the trainer uses alone."""
    start, policy = turn.start, turn.policies
    if start.tree.trainer_gpus or not start.own_gpus:  # holders are visible only while the trainer lives
        start.own_gpus = (frozenset(policy.gpu.trainer) or run_gpus(turn)) - frozenset(policy.gpu.inference)
    used = {i: memory for i in start.own_gpus if (memory := _memory(samples.get(i))) is not None}
    start.filled |= {index for index, memory in used.items() if memory >= policy.gpu.loaded}
    known = bool(start.own_gpus) and len(used) == len(start.own_gpus)
    full = any(memory >= policy.gpu.floor for memory in used.values()) if known else None
    start.watch("trainer-gpus", full, at, gap, arms=bool(start.filled))


# -- inference servers -------------------------------------------------------------------------------------------------


def observe_servers(turn: Turn) -> None:
    start, reading = turn.start, turn.snapshot.inference
    readable = reading.ok and bool(reading.value)
    if readable and start.paces.get("inference", UNPACED).last == reading.at:
        return
    asked = {s.url for s in reading.value or ()} if readable else set()
    for name, window in start.windows.items():
        if name.startswith(("health:", "sick:", "liveness:", "tokens:")) and name.partition(":")[2] not in asked:
            start.windows[name] = window.observe(None, max(reading.at, turn.at))
    if not readable:
        start.paces.pop("inference", None)
        return
    pace = start.paces["inference"] = start.paces.get("inference", UNPACED).observe(reading.at)
    start.servers = {
        s.url: _ask(turn, start.servers.get(s.url, Server(s.url)), s, reading.at, pace.gap())
        for s in reading.value or ()
    }


def _ask(turn: Turn, old: Server, sample: InferenceSample, at: float, gap: float) -> Server:
    start, url, health = turn.start, sample.url, sample.health
    arms = not turn.is_extra(sample)
    ok, dead = health is Health.OK, health in (Health.REFUSED, Health.UNHEALTHY)
    lively = None if sample.liveness is None else sample.liveness is Liveness.OK
    healthy = start.watch(f"health:{url}", True if ok else False if dead else None, at, gap, arms=arms).armed
    start.watch(f"liveness:{url}", lively, at, gap, arms=arms)
    _observe_tokens(start, old, sample, at, gap, arms=arms)
    start.watch(f"sick:{url}", ok, at, gap, arms=arms)
    if sample.asleep and arms:
        turn.saw("sleep")
    tokens, running = sample.generation_tokens_total, sample.requests_running
    grew = tokens is not None and old.tokens is not None and tokens > old.tokens
    work = None if running is None else running > 0 or (sample.requests_waiting or 0.0) > 0
    declared = at if health is Health.UNHEALTHY and healthy else None if ok else old.declared_at
    return Server(
        url, health, tokens, old.counts or tokens is not None, at if grew else old.grew_at, work, not sample.asleep,
        declared,
    )  # fmt: skip


def _observe_tokens(start: Start, old: Server, sample: InferenceSample, at: float, gap: float, *, arms: bool) -> None:
    """Failing: requests run, and no token is made."""
    tokens, running = sample.generation_tokens_total, sample.requests_running
    good: bool | None = None
    grew = tokens is not None and old.tokens is not None and tokens > old.tokens
    if tokens is not None and old.tokens is not None:
        good = not (tokens == old.tokens and running is not None and running > 0 and not sample.asleep)
    start.watch(f"tokens:{sample.url}", good, at, gap, arms=arms and grew)


# -- out of memory -----------------------------------------------------------------------------------------------------


def observe_ooms(turn: Turn) -> None:
    """When the OOM-kill counter of the run's cgroup grew."""
    start, host = turn.start, turn.snapshot.host
    now = host.value.oom_kills if host.ok and host.value is not None else None
    if now is None or now == start.ooms:
        return
    if start.ooms is not None and now > start.ooms:
        start.oom_at = (*start.oom_at, host.at)[-OOMS_LISTED:]
    start.ooms = now


# -- what was healthy --------------------------------------------------------------------------------------------------


def remember_armed(turn: Turn) -> None:
    """The windows that a podwatch that is restarted must know as armed."""
    turn.saw(*(name for name, window in turn.start.windows.items() if window.armed and name.startswith(REMEMBERED)))


OBSERVERS = (
    observe_progress, observe_saves, observe_processes, observe_servers, observe_gpus, observe_ooms, remember_armed,
)  # fmt: skip
