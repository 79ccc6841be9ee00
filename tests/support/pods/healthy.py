"""A run that works: it loads, compiles, samples, trains, swaps weights, saves, evaluates, and is started again by its
person.

The longest silences here are those its programs document: prime-rl's first try of a weight update (720 s), a save of
47 GB onto a slow volume (50 min), an evaluation (40 min, tokens flow), rollouts that wait for tools (20 min). A run
that rests for longer without any sign of work is not in these figures.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from tests.drivers.detection import (
    INTERRUPTED,
    CheckpointMark,
    Desired,
    ExitStatus,
    Health,
    Liveness,
    LogMatch,
    ProcessRole,
    ProcessSample,
    Supervision,
)
from tests.support.pods.shapes import PING, SAVE, Shape, Span
from tests.support.pods.tree import process
from tests.support.pods.world import GIB, Piece, Server, World

ENGINE_BYTES, TRAINER_BYTES = 60 * GIB, 66 * GIB
SHARED_ENGINE_BYTES, SHARED_TRAINER_BYTES = 36 * GIB, 24 * GIB
CONTEXT = 500 << 20
"""A bare CUDA context."""
ASLEEP_BYTES = 1200 << 20
ROLES = (ProcessRole.ENGINE, ProcessRole.INFERENCE, ProcessRole.ORCHESTRATOR, ProcessRole.TRAINER)
REAL_LIMIT = 3000.0
"""The longest save, in seconds: 47 GB at 15 MB/s."""


class Run:
    """One pod with one run on it. ``life`` is the piece that makes it go."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.world = w = World(seed, shape.cards)
        self._held: dict[tuple[int, str], float] = {}
        for card in w.cards:
            card.noise = int(shape.noise_gib * GIB)
            card.use = 0.0 if shape.utilization else None
        own = set(shape.inference) | set(shape.trainer)
        for index, card in enumerate(w.cards):
            if index not in own:
                card.use = 0.0
        w.supervision = shape.supervision
        w.logs = () if shape.logs else None
        self.servers: list[Server] = []
        if shape.urls:
            self.servers = [
                Server(f"http://127.0.0.1:{8100 + n}" if shape.engines > 1 else "http://127.0.0.1:8000",
                       counters=shape.counters, at=w.now)
                for n in range(shape.engines)
            ]  # fmt: skip
            if shape.engines > 1:
                w.servers.append(Server("http://127.0.0.1:8000", router=True, counters=False, at=w.now))
            w.servers += self.servers
        self.starts = self.reloads = 0
        self.number = 0
        self.phase = "down"
        """What the run does: down, load, rollouts, tools, train, update, save, evaluate."""
        self.engine_bytes: float = SHARED_ENGINE_BYTES if shape.shared else ENGINE_BYTES
        self.trainer_bytes: float = SHARED_TRAINER_BYTES if shape.shared else TRAINER_BYTES
        w.add(self.life(), "life", 3.0)

    # -- parts of it

    def between(self, span: Span) -> float:
        return self.world.rng.uniform(*span)

    def chance(self, share: float) -> bool:
        return share > 0.0 and self.world.rng.random() < share

    def hold(self, who: str, indices: tuple[int, ...], amount: float) -> None:
        """``who`` holds this much on each of these GPUs."""
        for index in indices:
            self._held[index, who] = amount
            self.world.memory(index, sum(held for (i, _), held in self._held.items() if i == index))

    def engine_processes(self) -> tuple[ProcessSample, ...]:
        shape = self.shape
        cuda = None if shape.cuda else False
        command = "VLLM::EngineCore --enable-sleep-mode" if shape.sleep == "flag" else "VLLM::EngineCore"
        each = len(shape.inference) // shape.engines
        made: list[ProcessSample] = []
        for n in range(shape.engines):
            gpus = shape.inference[n * each : (n + 1) * each]
            if each == 1:
                made.append(self._seen(process(40 + n, ProcessRole.ENGINE, gpus, cuda, parent=20 + n, command=command)))
                continue
            made.append(self._seen(process(40 + n, ProcessRole.ENGINE, (), cuda, parent=20 + n, command=command)))
            made += [self._seen(process(50 + gpu, ProcessRole.ENGINE, (gpu,), cuda, parent=40 + n)) for gpu in gpus]
        return tuple(made)

    def _seen(self, sample: ProcessSample) -> ProcessSample:
        """As podwatch sees it: where contexts cannot be read, nobody knows."""
        return sample if self.shape.cuda else replace(sample, cuda=None, gpus=frozenset())

    def numbered(self, sample: ProcessSample) -> ProcessSample:
        """Each start has processes of its own."""
        identity = replace(sample.identity, pid=sample.identity.pid + self.number)
        parent = sample.parent_pid + self.number if sample.parent_pid > 1 else 1
        return replace(sample, identity=identity, parent_pid=parent)

    def sampling(self, busy: bool, rate: float = 1.0) -> None:
        """The engine works, or not."""
        w, shape = self.world, self.shape
        for server in self.servers:
            server.work(w.now, rate * w.rng.uniform(500, 4000) if busy else 0.0, float(int(16 * rate)) if busy else 0.0)
        w.use(shape.inference, 90.0 if busy else 0.0)

    def training(self, busy: bool) -> None:
        if not (self.shape.shared and self.phase == "rollouts"):
            self.world.use(self.shape.trainer, 88.0 if busy else 0.0)

    # -- its life

    def life(self) -> Piece:
        while True:
            yield from self._start()
            until = self.world.rng.expovariate(self.shape.person / 3600.0) if self.shape.person else 1e12
            ends = self.world.now + until
            while self.world.now < ends:
                yield from self._step()
            yield from self._restart_by_hand()

    def _start(self) -> Piece:
        w, shape = self.world, self.shape
        self.starts += 1
        self.number = 1000 * self.starts
        self.phase = "load"
        make = self.numbered
        w.start(f"start-{self.starts}", make(process(10, ProcessRole.LAUNCHER, parent=1)))
        if shape.liveness:
            for server in self.servers:
                server.liveness = None
        yield self.between((1.0, 8.0))
        w.spawn(*(make(process(20 + n, ProcessRole.INFERENCE)) for n in range(shape.engines)))
        w.spawn(make(process(13, ProcessRole.ORCHESTRATOR)))
        w.spawn(make(self._seen(process(14, ProcessRole.TRAINER, shape.trainer))))
        self.hold("trainer", shape.trainer, CONTEXT)
        yield self.between((3.0, 20.0))
        w.desired = Desired.RUNNING  # the new start has been seen
        w.spawn(*(make(p) for p in self.engine_processes()))
        self.hold("engine", shape.inference, CONTEXT)
        load = self.between(shape.load)
        for n in range(1, 9):
            yield load / 8
            self.hold("engine", shape.inference, self.engine_bytes * n / 8)
            self.hold("trainer", shape.trainer, self.trainer_bytes * n / 10)
        for server in w.servers:
            server.health = Health.OK
            server.work(w.now, 0.0, 0.0)
            server.tokens = 0.0
            server.asleep = False if shape.sleep == "asks" else None
            server.liveness = Liveness.OK if shape.liveness and not server.router else None
        w.use(shape.trainer, 60.0)
        yield self.between(shape.compile)
        self.hold("trainer", shape.trainer, self.trainer_bytes)

    def _step(self) -> Piece:
        w, shape = self.world, self.shape
        length = shape.step_seconds * w.rng.uniform(0.75, 1.3)
        if self.chance(shape.slow_step):
            length *= 5.0
        self.phase = "rollouts"
        self.sampling(True)
        self.training(not shape.synchronous)
        if self.chance(shape.tool_bound):
            yield length * 0.3
            yield from self._tools()
            yield length * 0.3
        else:
            yield length * 0.6
        self.phase = "train"
        if shape.synchronous:
            self.sampling(False)
        self.training(True)
        yield from self._train(length * 0.4)
        yield from self._update()
        w.step += 1
        for source in shape.sources:
            if source is PING:
                w.sign(source, "trainer", None)
            elif source is not SAVE:
                w.sign(source, "trainer", w.step)
        if w.step % shape.save_every == 0:
            yield from self._save()
        if self.chance(shape.evaluation):
            yield from self._evaluate()
        if self.chance(shape.reload * length / 3600.0):
            yield from self.reload()

    def _tools(self) -> Piece:
        self.phase = "tools"
        self.sampling(False)
        self.training(False)
        yield self.between(self.shape.tool_seconds)
        self.phase = "rollouts"
        self.sampling(True)
        self.training(not self.shape.synchronous)

    def _train(self, seconds: float) -> Piece:
        w, shape = self.world, self.shape
        if not shape.sleep:
            if shape.shared:
                self.hold("trainer", shape.trainer, self.trainer_bytes * w.rng.uniform(0.7, 1.2))
            yield seconds
            return
        nap = min(seconds, 300.0)
        self.hold("engine", shape.inference, ASLEEP_BYTES)
        for server in self.servers:
            server.asleep = True if shape.sleep == "asks" else None
        yield nap
        for server in self.servers:
            server.asleep = False if shape.sleep == "asks" else None
        self.hold("engine", shape.inference, self.engine_bytes)
        yield seconds - nap

    def _update(self) -> Piece:
        """Requests stay queued, no token comes, and ``/liveness`` waits behind it."""
        w, shape = self.world, self.shape
        self.phase = "update"
        self.training(False)
        for server in self.servers:
            server.work(w.now, 0.0, 8.0)
        w.use(shape.inference, 0.0)
        long = self.chance(shape.long_update)
        seconds = 720.0 + self.between((5.0, 90.0)) if long else min(self.between(shape.update), shape.step_seconds)
        if seconds > 30.0:
            for server in self.servers:
                server.liveness = Liveness.TIMEOUT if server.liveness is not None else None
        if self.chance(shape.dip):
            low = min(seconds, self.between((0.5, 6.0)))
            self.hold("engine", shape.inference, CONTEXT)
            yield low
            self.hold("engine", shape.inference, self.engine_bytes)
            seconds -= low
        yield seconds
        for server in self.servers:
            server.liveness = Liveness.OK if server.liveness is not None else None

    def _save(self) -> Piece:
        w, shape = self.world, self.shape
        self.phase = "save"
        w.saving = True
        yield self.between((600.0, REAL_LIMIT)) if self.chance(shape.long_save) else self.between(shape.save)
        w.saving = False
        w.mark = CheckpointMark(w.step, w.now + w.wall_offset)
        if SAVE in shape.sources:
            w.sign(SAVE, "trainer", w.step)

    def _evaluate(self) -> Piece:
        self.phase = "evaluate"
        self.training(False)
        self.sampling(True)
        seconds = self.between(self.shape.evaluation_seconds)
        yield seconds * 0.8
        self.sampling(False)
        yield min(seconds * 0.2, 240.0)

    def reload(self) -> Piece:
        """Somebody ends the engine, or its whole server, and starts another in its place."""
        w, shape = self.world, self.shape
        self.reloads += 1
        whole = w.rng.random() < 0.5
        self.phase = "reload"
        self.sampling(False)
        self.training(False)
        w.end(ProcessRole.ENGINE, *((ProcessRole.INFERENCE,) if whole else ()))
        self.hold("engine", shape.inference, 0)
        for server in w.servers if whole else self.servers:
            server.health = (
                Health.REFUSED if whole else w.rng.choice((Health.REFUSED, Health.TIMEOUT, Health.UNHEALTHY))
            )
        if whole:
            yield self.between((0.05, 4.0))
            w.spawn(*(self.numbered(process(20 + n, ProcessRole.INFERENCE)) for n in range(shape.engines)))
            yield self.between((3.0, 20.0))
        else:
            yield self.between((0.05, 2.0))
        w.spawn(*(self.numbered(p) for p in self.engine_processes()))
        self.hold("engine", shape.inference, CONTEXT)
        load = self.between((20.0, 200.0))
        for n in range(1, 9):
            yield load / 8
            self.hold("engine", shape.inference, self.engine_bytes * n / 8)
        for server in w.servers:
            server.health = Health.OK
        yield self.between((8.0, 20.0))

    def _restart_by_hand(self) -> Piece:
        w = self.world
        if w.supervision is Supervision.ATTACH:
            yield from self.ctrl_c()
        else:
            ways: list[Callable[[], Piece]] = [self._asked_to_stop, self.launcher_killed]
            if w.logs is not None:  # an exit code 1 of which nothing is reported is a failure
                ways += [self.launcher_signalled, self.group_signalled]
            yield from w.rng.choice(ways)()
        yield self.between((5.0, 60.0))

    def _asked_to_stop(self) -> Piece:
        """``podwatch stop-training``."""
        w = self.world
        w.desired = Desired.STOPPED
        yield self.between((1.0, 5.0))
        if self.chance(0.5):
            yield from self._end_slowly({role: w.rng.uniform(0.0, 60.0) for role in ROLES})
        self.go_down(ExitStatus(143))
        if self.chance(0.3):
            yield self.between((600.0, 7200.0))

    def launcher_signalled(self) -> Piece:
        """``kill`` or ``kill -INT`` of prime-rl's launcher: it reports the signal, waits up to 5 s for each of its
        threads, and ends its children one after another, each when the one before has ended. The orchestrator has no
        handler for SIGTERM; vLLM's server outlives its engine by seconds, and FSDP takes its time."""
        w = self.world
        self.interrupted("")
        yield self.between((10.0, 45.0))
        server = w.rng.uniform(0.0, 4.0)
        orchestrator = server + w.rng.uniform(0.05, 1.0)
        yield from self._end_slowly({
            ProcessRole.ENGINE: 0.0, ProcessRole.INFERENCE: server, ProcessRole.ORCHESTRATOR: orchestrator,
            ProcessRole.TRAINER: orchestrator + w.rng.uniform(0.5, 60.0),
        })  # fmt: skip
        yield self.between((0.05, 1.0))
        self.go_down(ExitStatus(1))

    def group_signalled(self) -> Piece:
        """``kill -INT`` of the whole group: vLLM goes first, the orchestrator writes a last checkpoint, FSDP takes its
        time. torchrun reports the signal within moments."""
        w = self.world
        began = w.now
        w.add(self._reported_later(w.rng.uniform(0.05, 2.0)), "report")
        engine = w.rng.uniform(0.2, 6.0)
        orchestrator = w.rng.uniform(1.0, 40.0)
        yield from self._end_slowly({
            ProcessRole.ENGINE: engine, ProcessRole.INFERENCE: engine + w.rng.uniform(0.0, 3.0),
            ProcessRole.ORCHESTRATOR: orchestrator, ProcessRole.TRAINER: w.rng.uniform(3.0, 60.0),
        })  # fmt: skip
        yield max(0.05, began + 3.0 - w.now)
        self.go_down(ExitStatus(signal=2) if self.chance(0.5) else ExitStatus(1))

    def launcher_killed(self) -> Piece:
        """``kill`` of a launcher without a handler, as prime-rl's before 0.6: its children outlive it for a while."""
        w = self.world
        w.stop(ExitStatus(signal=15), leaving=ROLES)
        yield from self._end_slowly({role: w.rng.uniform(0.0, 60.0) for role in ROLES})
        self.go_down(ExitStatus(signal=15))

    def ctrl_c(self) -> Piece:
        """In the terminal of an attached trainer: every role in its own time, the engine first in half of them, and
        no log that podwatch reads says a word."""
        w = self.world
        ends = {role: w.rng.uniform(0.0, 60.0) for role in ROLES}
        if self.chance(0.5):
            ends |= {ProcessRole.ENGINE: 0.0, ProcessRole.INFERENCE: w.rng.uniform(0.0, 1.0)}
        yield from self._end_slowly(ends)
        self.go_down(ExitStatus())

    def interrupted(self, role: str) -> None:
        w = self.world
        if w.logs is not None:
            w.logs = (*w.logs, LogMatch(INTERRUPTED, role, 1, w.now, w.now, "Received SIGTERM"))

    def _reported_later(self, seconds: float) -> Piece:
        yield seconds
        self.interrupted("trainer")

    def _end_slowly(self, offsets: Mapping[ProcessRole, float]) -> Piece:
        """Each role so many seconds from now. A server that was asked to end closes its socket first."""
        w = self.world
        self.phase = "down"
        began = w.now
        for server in w.servers:
            server.health = Health.REFUSED if self.chance(0.9) else Health.TIMEOUT
            server.work(w.now, 0.0, 0.0)
        for role, offset in sorted(offsets.items(), key=lambda item: item[1]):
            if (rest := offset - (w.now - began)) > 0.0:
                yield rest
            self.role_ends(role)

    def role_ends(self, role: ProcessRole) -> None:
        w, shape = self.world, self.shape
        w.end(role)
        if role is ProcessRole.ENGINE:
            self.hold("engine", shape.inference, 0)
            w.use(shape.inference, 0.0)
        elif role is ProcessRole.INFERENCE:
            for server in w.servers:
                server.health = Health.REFUSED
        elif role is ProcessRole.TRAINER:
            self.hold("trainer", shape.trainer, 0)
            self.training(False)

    def go_down(self, status: ExitStatus) -> None:
        w, shape = self.world, self.shape
        self.phase = "down"
        w.stop(status)
        self.hold("engine", shape.inference, 0)
        self.hold("trainer", shape.trainer, 0)
        w.use((*shape.inference, *shape.trainer), 0.0)
        for server in w.servers:
            server.health = Health.REFUSED
            server.work(w.now, 0.0, 0.0)
            server.liveness = None
            server.asleep = None

    def pids(self, *roles: ProcessRole) -> Iterator[int]:
        return (p.identity.pid for p in self.world.processes if p.role in roles)
