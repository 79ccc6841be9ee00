"""What happens beside a healthy run and harms nothing: sensors, clocks, neighbours, and podwatch's own troubles.

Each piece stands for itself and comes at random, ``every`` so many seconds on average.
"""

from tests.drivers.detection import INTERRUPTED, Health, LogMatch, ProcessRole, SensorState
from tests.support.pods.healthy import Run
from tests.support.pods.world import GIB, Piece, World

HOUR = 3600.0


def wait(w: World, every: float) -> float:
    return w.rng.expovariate(1.0 / every)


def blind(w: World, sensor: str, every: float, longest: float, state: SensorState = SensorState.BLIND) -> Piece:
    """The sensor does not answer within its deadline, or is refused."""
    while True:
        yield wait(w, every)
        w.blind.why[sensor] = (state, "no answer within its deadline")
        yield w.rng.uniform(2.0, longest)
        w.blind.why.pop(sensor, None)


def stuck(w: World, sensor: str, every: float, longest: float) -> Piece:
    """The sensor's newest answer grows old."""
    while True:
        yield wait(w, every)
        w.blind.stuck.add(sensor)
        yield w.rng.uniform(2.0, longest)
        w.blind.stuck.discard(sensor)


def glitch(w: World, cards: tuple[int, ...], every: float) -> Piece:
    """One or two answers of NVML say that nothing is used."""
    while True:
        yield wait(w, every)
        index = w.rng.choice(cards)
        kept, w.cards[index].noise = w.cards[index].memory, w.cards[index].noise
        w.memory(index, 0)
        yield w.rng.uniform(1.0, 4.0)
        if w.cards[index].memory == 0:
            w.memory(index, kept)


def stalls(w: World, every: float) -> Piece:
    """podwatch itself does not run for a while; the run does."""
    while True:
        yield wait(w, every)
        w.stall += w.rng.choice((3.0, 10.0, 40.0, 300.0)) * w.rng.random()


def podwatch_restarts(w: World, every: float) -> Piece:
    while True:
        yield wait(w, every)
        w.stall += w.rng.uniform(2.0, 90.0)
        w.forget_readings()
        w.reborn = True


def suspends(w: World, every: float) -> Piece:
    """The machine sleeps: CLOCK_MONOTONIC stands, the other clocks go on, and connections break."""
    while True:
        yield wait(w, every)
        slept = w.rng.uniform(60.0, 8 * HOUR)
        w.wall_offset += slept
        w.boot_offset += slept
        for server in w.servers:
            if server.health is Health.OK:
                server.health = Health.TIMEOUT
        yield w.rng.uniform(2.0, 20.0)
        for server in w.servers:
            if server.health is Health.TIMEOUT:
                server.health = Health.OK


def clock_jumps(w: World, every: float) -> Piece:
    """The wall clock is set; file times taken just then are off by one look at the most."""
    while True:
        yield wait(w, every)
        w.wall_offset += w.rng.choice((-HOUR, HOUR, 0.5 * HOUR, -120.0, 5.0))
        w.progress_skew = w.rng.uniform(-2.0, 0.0)
        yield 4.0
        w.progress_skew = 0.0


def busy_servers(w: World, every: float) -> Piece:
    """A server answers too late for a while: long prompts, many requests."""
    while True:
        yield wait(w, every)
        if not w.servers:
            return
        server = w.rng.choice(w.servers)
        if server.health is Health.OK:
            server.health = Health.TIMEOUT
            yield w.rng.uniform(2.0, 90.0)
            if server.health is Health.TIMEOUT:
                server.health = Health.OK


def log_noise(w: World, every: float) -> Piece:
    """Lines that look like trouble and are none: retries that work, errors of one environment."""
    rules = ("api-connection-error", "cuda-error", "nccl-timeout", "out-of-memory")
    found: dict[str, LogMatch] = {}
    while True:
        yield wait(w, every)
        rule = w.rng.choice(rules)
        old = found.get(rule)
        count = (old.count if old else 0) + int(w.rng.uniform(1, 40))
        found[rule] = LogMatch(rule, "orchestrator", count, old.first_at if old else w.now, w.now, "APIConnectionError")
        if w.logs is not None:
            w.logs = (*(m for m in w.logs if m.rule == INTERRUPTED), *found.values())


def forks(run: Run, every: float) -> Piece:
    """A child bears its parent's title until it execs, or ends: milliseconds as a rule, here up to 25 s, and as if its
    parent were the launcher."""
    w, pid = run.world, 900_000
    while True:
        yield wait(w, every)
        if not w.alive:
            continue
        pid += 1
        w.fork(w.rng.choice((ProcessRole.ENGINE, ProcessRole.INFERENCE, ProcessRole.OTHER)), pid)
        yield w.rng.choice((0.05, 1.5, 5.0, 25.0)) * w.rng.random()
        w.end(pids=(pid,))


def neighbours(w: World, cards: tuple[int, ...], every: float) -> Piece:
    """Others load, work and leave on their GPUs."""
    while True:
        for index in cards:
            w.memory(index, w.rng.choice((0.0, 2.0, 30.0, 70.0)) * GIB)
            w.use((index,), w.rng.choice((0.0, 50.0, 98.0)))
        if not cards:
            return
        yield wait(w, every)


def drift(run: Run, every: float) -> Piece:
    """The KV cache, a graph pool, an allocator: what the engine holds moves by some percent."""
    w, least, most = run.world, 0.9 * run.engine_bytes, 1.05 * run.engine_bytes
    while True:
        yield wait(w, every)
        run.engine_bytes = max(least, min(most, run.engine_bytes * w.rng.uniform(0.97, 1.03)))


def add_all(run: Run) -> Run:
    """Everything of this file, as often as the shape says."""
    w, shape = run.world, run.shape
    rate = 1.0 / shape.trouble if shape.trouble else 1e9
    own = tuple(sorted({*shape.inference, *shape.trainer}))
    for piece in (
        blind(w, "gpus", 2 * HOUR * rate, 120.0),
        stuck(w, "gpus", 3 * HOUR * rate, 60.0),
        blind(w, "trainer", 6 * HOUR * rate, 300.0, SensorState.DENIED),
        blind(w, "progress", 6 * HOUR * rate, 900.0),
        blind(w, "inference", 6 * HOUR * rate, 300.0),
        stuck(w, "inference", 6 * HOUR * rate, 60.0),
        glitch(w, own, 5 * HOUR * rate),
        stalls(w, 1 * HOUR * rate),
        podwatch_restarts(w, 8 * HOUR * rate),
        suspends(w, 20 * HOUR * rate),
        clock_jumps(w, 10 * HOUR * rate),
        busy_servers(w, 1 * HOUR * rate),
        log_noise(w, 1 * HOUR * rate),
        forks(run, 1 * HOUR * rate),
        neighbours(w, shape.foreign, 0.5 * HOUR),
        drift(run, 0.3 * HOUR),
    ):
        w.add(piece, "oddity")
    return run
