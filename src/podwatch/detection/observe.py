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
    LEVEL_POLLS,
    LEVEL_READINGS,
    ROLE,
    Life,
    Machine,
    Memory,
    Saves,
    Server,
    Start,
    Tree,
)
from podwatch.detection.window import GAP_SECONDS
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
IDLE_PERCENT = 5.0
REMEMBERED = ("gpu", "cuda", "health:", "liveness:", "tokens:")
OOM_SHOWN_SECONDS = 3600.0
"""How long an OOM kill is remembered and shown; the journal keeps it."""


@dataclass(slots=True)
class Turn:
    """One turn: the snapshot, and what is remembered. The input of every rule.

    ``trainer``: its process tree, without any process if it could not be observed. ``wanted``: the desired state is
    ``running``. ``ending``: training is finishing or being stopped, so the end of its processes is expected.
    """

    snapshot: Snapshot
    policies: Policies
    start: Start
    machine: Machine
    learned: Learned
    trainer: TrainerSample
    wanted: bool = True
    ending: bool = False

    @property
    def at(self) -> float:
        return self.snapshot.at

    @property
    def trains(self) -> bool:
        """False while training is stopped or ending, and between two starts: an engine that is shut down writes the
        same log lines as one that dies."""
        between = self.snapshot.trainer.ok and not self.trainer.start_id
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

    def age(self, process: ProcessSample) -> float | None:
        """Seconds since it was started, at the reading of the tree; None if unknown."""
        snapshot = self.snapshot
        if snapshot.boot_at is None:
            return None
        return process.identity.age(snapshot.boot_at - (snapshot.at - snapshot.trainer.at))


def lasting_seconds(policy: GpuSettings) -> float:
    """Seconds that an engine or server process must have lived for its end to be evidence: loading a model takes
    longer, and a fork has its parent's name until it calls exec or ends."""
    return min(4.0 * policy.hold, 32.0)


# -- progress and saves ------------------------------------------------------------------------------------------------


def observe_progress(turn: Turn) -> None:
    start, snapshot = turn.start, turn.snapshot
    start.progress, turn.learned = follow(
        start.progress, snapshot.progress, at=snapshot.at, saving=snapshot.saving, learned=turn.learned
    )
    if start.progress.newest_at is not None:
        turn.saw("progress")
    first, newest = start.first_reading, start.progress.numbered_at
    settled = first is not None and newest is not None and newest >= first + SETTLE_SECONDS
    if settled and "settled" not in turn.learned.seen:
        roles = {life.role for life in start.lives.values()} & ENGINE_ROLES
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
            turn.learned = turn.learned.add(save_gaps=at - saves.at)
    turn.start.saves = Saves(newest.newest_step, at, higher)


# -- processes ---------------------------------------------------------------------------------------------------------


def observe_processes(turn: Turn) -> None:
    start, reading, trainer = turn.start, turn.snapshot.trainer, turn.trainer
    if not reading.ok or reading.at <= start.read_at or not (trainer.alive or trainer.exit is not None):
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
    lives, found = turn.start.lives, {p.identity: p for p in living}
    for identity, life in list(lives.items()):
        if identity not in found:
            lives[identity] = life if life.ended_at is not None else replace(life, ended_at=at)
        elif found[identity].role is not life.role or life.ended_at is not None:
            del lives[identity]  # it exec'd another program
        else:
            lives[identity] = replace(life, last=at)
    for identity, process in found.items():
        if process.role in ROLES and identity not in lives:
            lives[identity] = Life(identity, process.role, process.name, at - (turn.age(process) or 0.0), at)
    ended = sorted((life for life in lives.values() if life.ended_at is not None), key=lambda life: life.last)
    for life in ended[: max(0, len(lives) - LIVES_LISTED)]:
        del lives[life.identity]


def _observe_roles(start: Start, living: Iterable[ProcessSample], at: float) -> None:
    """A role is gone when no process of it is left: forks, replacements and single workers do not count."""
    present = frozenset(name for process in living for name in _names(process))
    known = {name.removeprefix(ROLE) for name in start.windows if name.startswith(ROLE)}
    for name in present | known:
        # A process seen at a single reading can be a fork that had its parent's name.
        start.watch(f"{ROLE}{name}", name in present, at, arms=name in start.present)
    start.present = present


def _names(process: ProcessSample) -> tuple[str, ...]:
    """The roles of a process. A trainer without a recognized name is known by its CUDA contexts."""
    names = (str(process.role),) if process.role in ROLES else ()
    return (*names, CONTEXTS) if process.cuda and process.role not in ENGINE_ROLES else names


def _observe_others(turn: Turn, living: Iterable[ProcessSample], at: float) -> None:
    """Helpers of the engine and its server end with them, and say nothing of the rest of the run."""
    start, found = turn.start, {p.identity: p for p in living}
    if turn.snapshot.boot_at is None:
        return
    if start.others - found.keys():
        start.other_ended = at
    engine = {p.identity.pid for p in found.values() if p.role in ENGINE_ROLES}
    others = [p for p in found.values() if p.role not in ENGINE_ROLES and p.parent_pid not in engine]
    least = lasting_seconds(turn.policies.gpu)
    start.others = frozenset(p.identity for p in others if (turn.age(p) or 0.0) >= least)


def _observe_contexts(turn: Turn, living: Iterable[ProcessSample], at: float) -> None:
    start, policy, gpus = turn.start, turn.policies.gpu, turn.snapshot.gpus
    if not start.minors and gpus.ok and gpus.value:
        found = {g.minor: g.index for g in gpus.value if g.minor is not None}
        start.minors = found if len(found) == len(gpus.value) else {}
    held: dict[bool, set[int]] = {True: set(), False: set()}  # by the engine, by the others
    blind = {process.role in ENGINE_ROLES for process in living if process.cuda is None}
    for process in living:
        engine = process.role in ENGINE_ROLES
        start.sleeps = start.sleeps or (engine and _has_flag(process.command, "--enable-sleep-mode"))
        if process.cuda:
            minors = start.minors or {n: n for n in process.gpus}
            held[engine] |= {minors[n] for n in process.gpus if n in minors}
    start.tree = Tree(frozenset(held[False]), frozenset(held[True]), bool(blind))
    for index in policy.inference:
        shared = index in policy.shared
        open_now = index in held[True] or (not shared and index in held[False])
        unknown = True in blind if shared else bool(blind)
        # On a shared GPU only the engine's contexts count, and only of an engine that training needs.
        arms = not shared or turn.needs(ProcessRole.ENGINE)
        start.watch(f"cuda{index}", True if open_now else None if unknown else False, at, arms=arms)


def _has_flag(command: str, flag: str) -> bool:
    """Whether the flag is set; vLLM accepts ``_`` for ``-``."""
    words = [word.partition("=") for word in command.split()]
    return any(n.replace("_", "-") == flag and v.lower() not in ("false", "0", "no") for n, _, v in words)


# -- GPUs --------------------------------------------------------------------------------------------------------------


def observe_gpus(turn: Turn) -> None:
    start, reading, policy = turn.start, turn.snapshot.gpus, turn.policies.gpu
    if not reading.ok or reading.value is None:
        start.lost(("gpu", "idle", "trainer-gpus"), max(reading.at, turn.at))
        start.idle_unknown = start.idle_unknown or reading.detail or "not observed"
        start.read.pop("gpus", None)
        return
    at, longest = reading.at, 3.0 * start.pace("gpus", reading.at)
    short = max(0.75 * policy.hold, longest)  # the window of 8 s: at most three polls of 2 s apart
    samples = {g.index: g for g in reading.value}
    start.mig = frozenset(i for i in policy.inference if i in samples and samples[i].mig)
    for index in policy.inference:
        _observe_memory(turn, index, _memory(samples.get(index)), at, short)
    _observe_use(turn, reading.value, at, max(GAP_SECONDS, longest))
    _observe_own_gpus(turn, samples, at, short)


def _memory(sample: GpuSample | None) -> int | None:
    """Bytes in use; None for a GPU that is lost, missing or partitioned: no evidence."""
    if sample is None or sample.state is not GpuState.OK or sample.mig:
        return None
    return sample.memory_used_bytes


def _observe_memory(turn: Turn, index: int, memory: int | None, at: float, gap: float) -> None:
    start, policy, name = turn.start, turn.policies.gpu, f"gpu{index}"
    window, found = start.of(name), start.memory.get(index, Memory())
    if memory is None or at <= (window.last or float("-inf")):
        start.watch(name, None, max(at, window.last or at))
        return
    below = memory < policy.floor
    if index in policy.shared:
        level = found.level or (turn.learned.baseline(index) or 0 if window.armed else 0)
        below = below or memory < SHARED_PART * level
    found = replace(found, value=memory, used_at=found.used_at if below else at)
    if below or memory < policy.loaded:
        start.memory[index] = found if found.level else replace(found, recent=())
        start.watch(name, not below, at, gap, arms=False)
        return
    found = replace(found, recent=(*found.recent, memory)[-LEVEL_READINGS:])
    start.memory[index] = replace(found, highest=max(found.highest, found.level))
    if found.level > found.highest:
        turn.learned = turn.learned.with_baseline(index, found.level)
    # Memory can be full long before the engine works: armed only after another signal was healthy too.
    servers = any(window.armed for name, window in start.windows.items() if name.startswith("health:"))
    works = servers or "progress" in turn.learned.seen
    start.watch(name, True, at, gap, arms=works and len(found.recent) >= LEVEL_POLLS)


def run_gpus(turn: Turn) -> frozenset[int]:
    """NVML indices of this run's GPUs; empty if unknown, and then all GPUs of the pod count.

    If only the inference GPUs are configured, the trainer's are read from the process tree, but only if the tree also
    shows the engine's GPUs correctly: in a container the device numbers in /proc can be the host's.
    """
    policy, tree = turn.policies.gpu, turn.start.tree
    inference = frozenset(policy.inference)
    if policy.trainer:
        return inference | frozenset(policy.trainer)
    held = tree.trainer_gpus | tree.engine_gpus
    return inference | held if tree.trainer_gpus and inference <= held and not tree.blind else frozenset()


def _observe_use(turn: Turn, gpus: Iterable[GpuSample], at: float, gap: float) -> None:
    """A device that always reports 0 % proves nothing: idle counts once the GPUs of this run were seen busy."""
    start, ours = turn.start, run_gpus(turn)
    mine = [g for g in gpus if not ours or g.index in ours]
    unknown = [g.index for g in mine if g.state is not GpuState.OK or g.utilization_percent is None or g.mig]
    missing = "" if mine and len(mine) >= len(ours) else "NVML does not list every GPU of this run"
    start.idle_unknown = f"not reported by GPU {unknown[0]}" if unknown else missing
    if start.idle_unknown:
        start.windows["idle"] = start.of("idle").reset()
        return
    busy = max(g.utilization_percent or 0.0 for g in mine) >= IDLE_PERCENT
    if busy and not turn.learned.utilization_works:
        turn.learned = replace(turn.learned, utilization_works=True)
    window = start.watch("idle", busy, at, gap)
    start.windows["idle"] = replace(window, armed=turn.learned.utilization_works)


def _observe_own_gpus(turn: Turn, samples: dict[int, GpuSample], at: float, gap: float) -> None:
    """The memory of the GPUs that the trainer uses alone."""
    start, policy = turn.start, turn.policies.gpu
    if start.tree.trainer_gpus or not start.own_gpus:  # holders are visible only while the trainer lives
        start.own_gpus = (frozenset(policy.trainer) or run_gpus(turn)) - frozenset(policy.inference)
    used = {i: memory for i in start.own_gpus if (memory := _memory(samples.get(i))) is not None}
    start.filled |= {index for index, memory in used.items() if memory >= policy.loaded}
    known = bool(start.own_gpus) and len(used) == len(start.own_gpus)
    full = any(memory >= policy.floor for memory in used.values()) if known else None
    start.watch("trainer-gpus", full, at, gap, arms=bool(start.filled))


# -- inference servers -------------------------------------------------------------------------------------------------


def observe_servers(turn: Turn) -> None:
    start, reading = turn.start, turn.snapshot.inference
    samples = reading.value or () if reading.ok else ()
    if samples and start.read.get("inference", ())[-1:] == (reading.at,):
        return
    asked = frozenset(s.url for s in samples)
    start.lost(("health:", "sick:", "liveness:", "tokens:"), max(reading.at, turn.at), asked)
    if not samples:
        start.read.pop("inference", None)
        return
    gap = max(GAP_SECONDS, 3.0 * start.pace("inference", reading.at))
    start.servers = {s.url: _observe_server(turn, s, reading.at, gap) for s in samples}


def _observe_server(turn: Turn, sample: InferenceSample, at: float, gap: float) -> Server:
    start, url, health = turn.start, sample.url, sample.health
    old, arms = start.servers.get(url, Server(sample)), not turn.is_extra(sample)
    ok, dead = health is Health.OK, health in (Health.REFUSED, Health.UNHEALTHY)
    lively = None if sample.liveness is None else sample.liveness is Liveness.OK
    before, tokens = (old.newest.generation_tokens_total, sample.generation_tokens_total)
    known = tokens is not None and before is not None and url in start.servers
    grew = known and (tokens or 0.0) > (before or 0.0)
    stuck = tokens == before and (sample.requests_running or 0.0) > 0 and not sample.asleep
    healthy = start.watch(f"health:{url}", ok or (False if dead else None), at, gap, arms=arms).armed
    start.watch(f"liveness:{url}", lively, at, gap, arms=arms)
    start.watch(f"tokens:{url}", not stuck if known else None, at, gap, arms=arms and grew)
    start.watch(f"sick:{url}", ok, at, gap, arms=arms)
    if sample.asleep and arms:
        turn.saw("sleep")
    declared = at if health is Health.UNHEALTHY and healthy else None if ok else old.declared_at
    return Server(sample, old.counts or tokens is not None, at if grew else old.grew_at, declared)


# -- out of memory, and what was healthy -------------------------------------------------------------------------------


def observe_ooms(turn: Turn) -> None:
    """When the OOM-kill counter of the trainer's cgroup grew. A lower number is the counter of a new cgroup (training
    was restarted): all its kills are new."""
    start, machine, host = turn.start, turn.machine, turn.snapshot.host
    if not host.ok or host.value is None or host.value.oom_kills is None:
        return
    now, before = host.value.oom_kills, machine.ooms
    another = start.host_read_at is None or (before is not None and now < before)
    if another and start.first_reading is not None and host.at > start.first_reading:
        start.host_read_at = host.at
    grown = 0 if before is None else now - before if now >= before else now
    kills = (*machine.oom_kills, (host.at, grown)) if grown else machine.oom_kills
    machine.ooms, machine.oom_kills = now, tuple(kill for kill in kills if host.at - kill[0] < OOM_SHOWN_SECONDS)


def remember_armed(turn: Turn) -> None:
    """The windows that a podwatch that is restarted must know as armed."""
    turn.saw(*(name for name, window in turn.start.windows.items() if window.armed and name.startswith(REMEMBERED)))


OBSERVERS = (
    observe_progress, observe_saves, observe_processes, observe_servers, observe_gpus, observe_ooms, remember_armed,
)  # fmt: skip
