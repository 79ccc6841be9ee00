"""Every fault that concerns detection: which signals change, what is to be said of it, and how soon.

The list follows the fault list of facts/peers.md and facts/prime-rl.md sections 3 to 5. A fault strikes a healthy run
in the middle of a phase; its pieces change what the sensors will see, in the order and at the pace the facts tell.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.drivers.detection import (
    ExitStatus,
    GpuState,
    Health,
    Learned,
    Liveness,
    LogMatch,
    Policies,
    ProcessRole,
    SensorState,
    Verdict,
    hang_limit,
    no_step_limit,
    patience_seconds,
    quiet_seconds,
    save_limit,
)
from tests.drivers.detection import FindingKind as Kind
from tests.support.pods.healthy import CONTEXT, Run
from tests.support.pods.shapes import SHAPES, Shape
from tests.support.pods.world import Piece

Bound = Callable[[Learned, Policies, Shape], float]
"""Seconds from the blow to the verdict, from what was learned and the thresholds."""
WORKING = ("rollouts", "train", "tools")
SHAPE = {shape.name: shape for shape in SHAPES}
OWN = SHAPES[0]
TP = SHAPE["TP over 4 GPUs, trainer on 4"]
ROUTER = SHAPE["router and two engines"]
SHARED = SHAPE["colocated, no sleep"]
SLEEPS = SHAPE["colocated, sleep mode by flag"]
POOR = SHAPE["no server asked, contexts unreadable"]
ATTACHED = SHAPE["attached, GPUs without utilisation"]


def seconds(value: float) -> Bound:
    return lambda _learned, _policy, _shape: value


def _steps(learned: Learned, policy: Policies, shape: Shape) -> float:
    """A step in flight may still end, and then no more come."""
    return no_step_limit(learned, policy.hang) + 1.5 * shape.step_seconds + 10.0


def _hang(learned: Learned, policy: Policies, shape: Shape) -> float:
    """A step in flight may still end; what a weight update would hold up has to stand still for 24 min."""
    return max(hang_limit(learned, policy.hang) + 1.5 * shape.step_seconds, 1440.0) + 10.0


def _idle(learned: Learned, policy: Policies, shape: Shape) -> float:
    """Without a request in flight idle GPUs have to stay so for 30 minutes."""
    return max(_hang(learned, policy, shape), 3.0 * quiet_seconds(policy.hang) + 10.0)


def _patience(learned: Learned, policy: Policies, _shape: Shape) -> float:
    return patience_seconds(learned, policy) + 10.0


def _save(learned: Learned, policy: Policies, _shape: Shape) -> float:
    return save_limit(learned) + hang_limit(learned, policy.hang) + 10.0


SILENT = seconds(15.0)
"""DESIGN section 8."""
SEEN_TO_END = seconds(5.0)
"""The engine is seen to end and its server agrees: ``hold`` is not waited for."""
BY_CHILD = seconds(25.0)
"""hold 8 s, after 5 s in which a replacement may come, seen by sensors that look every 2 to 5 s."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``kinds``: any of them is right. ``verdict`` NONE: it is to be told, and nothing is to be restarted."""

    name: str
    changes: str
    strike: Callable[[Run], Piece]
    bound: Bound
    kinds: tuple[Kind, ...] = (Kind.SILENT_DEATH, Kind.REQUIRED_CHILD_EXITED)
    verdict: Verdict = Verdict.RESTART
    shape: Shape = OWN
    phases: tuple[str, ...] = WORKING
    after: float = 2400.0
    """Seconds of healthy life before it may strike."""
    max_steps: int | None = None


# -- what can go, and how


def lose_engine(run: Run, *, processes: bool = True, gpus: tuple[int, ...] | None = None) -> None:
    w = run.world
    indices = run.shape.inference if gpus is None else gpus
    run.hold("engine", indices, 0)
    w.use(indices, 0.0)
    if processes:
        w.end(ProcessRole.ENGINE)
    for server in run.servers:
        server.work(w.now, 0.0, server.running)


def health(run: Run, state: Health) -> None:
    for server in run.servers:
        if not server.router:
            server.health = state


def lose_server(run: Run) -> None:
    """The API server ends with code 0, which prime-rl's launcher ignores."""
    run.world.end(ProcessRole.INFERENCE)
    for server in run.world.servers:
        server.health = Health.REFUSED


def quieten(run: Run) -> Piece:
    """The trainer ends its step, waits for a batch that never comes, and the orchestrator's log fills up."""
    w = run.world
    if w.rng.random() < 0.5:
        yield w.rng.uniform(1.0, run.shape.step_seconds)
        w.step += 1
        for source in run.shape.sources:
            w.sign(source, "trainer", w.step)
    w.saving = False
    run.training(False)
    first = w.now
    count = 0
    while True:
        yield 5.0
        count += 16
        if count <= 512:
            w.logs = (LogMatch("api-connection-error", "orchestrator", count, first, w.now, "APIConnectionError"),)


def engine_dies(run: Run) -> Piece:
    lose_engine(run)
    health(run, Health.UNHEALTHY)
    yield run.world.rng.uniform(0.5, 5.0)
    lose_server(run)
    yield from quieten(run)


def server_exits(run: Run) -> Piece:
    lose_server(run)
    lose_engine(run)
    yield from quieten(run)


def engine_core_gone(run: Run) -> Piece:
    lose_engine(run)
    yield from quieten(run)


def memory_gone_503(run: Run) -> Piece:
    lose_engine(run, processes=False)
    health(run, Health.UNHEALTHY)
    yield from quieten(run)


def memory_gone_refused(run: Run) -> Piece:
    lose_engine(run, processes=False)
    health(run, Health.REFUSED)
    yield from quieten(run)


def memory_gone_only(run: Run) -> Piece:
    lose_engine(run, processes=False)
    for server in run.servers:
        server.running = 0.0
    yield from quieten(run)


def one_rank_gone(run: Run) -> Piece:
    w = run.world
    lose_engine(run, processes=False, gpus=(2,))
    w.end(pids=(52 + run.number,))
    w.use(run.shape.inference, 0.0)
    yield from quieten(run)


def one_engine_of_two(run: Run) -> Piece:
    w = run.world
    run.hold("engine", (1,), 0)
    w.use((1,), 0.0)
    w.end(pids=(41 + run.number, 21 + run.number))
    run.servers[1].health = Health.REFUSED
    yield from quieten(run)


def server_killed(run: Run) -> Piece:
    """SIGKILL of the API server: its engine lives on and holds the memory (vllm#55510)."""
    lose_server(run)
    for server in run.servers:
        server.work(run.world.now, 0.0, 0.0)
    yield from quieten(run)


def while_podwatch_is_away(run: Run) -> Piece:
    w = run.world
    w.stall += 40.0
    w.forget_readings()
    w.reborn = True
    yield 10.0
    yield from engine_dies(run)


def while_nvml_is_blind(run: Run) -> Piece:
    w = run.world
    w.blind.why["gpus"] = (SensorState.BLIND, "NVML did not answer within 5 s")
    lose_engine(run)
    yield 60.0
    w.blind.why.pop("gpus")
    yield from quieten(run)


def nvml_gone_for_good(run: Run) -> Piece:
    run.world.blind.why["gpus"] = (SensorState.BLIND, "NVML did not answer within 5 s")
    yield from engine_dies(run)


def nvml_hangs(run: Run) -> Piece:
    run.world.blind.why["gpus"] = (SensorState.BLIND, "NVML did not answer within 5 s")
    run.world.add(run.life(), "life")
    yield from ()


def gpu_lost(run: Run) -> Piece:
    run.world.card(run.shape.inference[0], GpuState.LOST)
    yield 30.0


# -- exits


def launcher_ends(
    status: ExitStatus, *, oom: bool = False, leaving: tuple[ProcessRole, ...] = ()
) -> Callable[[Run], Piece]:
    def strike(run: Run) -> Piece:
        w = run.world
        if oom:
            w.grow(oom_kills=(w.host.oom_kills or 0) + 1)
        w.stop(status, leaving=leaving)
        run.hold("trainer", run.shape.trainer, 0)
        if ProcessRole.ENGINE not in leaving:
            run.hold("engine", run.shape.inference, 0)
            for server in w.servers:
                server.health = Health.REFUSED
        w.use((*run.shape.inference, *run.shape.trainer), 0.0)
        yield from ()

    return strike


def server_exits_while_loading(run: Run) -> Piece:
    lose_server(run)
    lose_engine(run)
    yield from ()


def orchestrator_gone(run: Run) -> Piece:
    w = run.world
    w.end(ProcessRole.ORCHESTRATOR)
    for server in run.servers:
        server.work(w.now, 0.0, 0.0)
    w.use(run.shape.inference, 0.0)
    yield from quieten(run)


def trainer_gone(run: Run) -> Piece:
    """Its launcher does not notice."""
    w = run.world
    w.end(ProcessRole.TRAINER)
    run.hold("trainer", run.shape.trainer, 0)
    w.use((*run.shape.trainer, *run.shape.inference), 0.0)
    for server in run.servers:
        server.work(w.now, 0.0, 0.0)
    yield from ()


# -- hangs


def engine_hangs(run: Run) -> Piece:
    """Health stays 200 for ever (vllm#39863)."""
    w = run.world
    for server in run.servers:
        server.work(w.now, 0.0, 16.0)
    w.use(run.shape.inference, w.rng.choice((0.0, 100.0)))
    yield from quieten(run)


def engine_hangs_liveness(run: Run) -> Piece:
    for server in run.servers:
        server.counters = False
        server.liveness = Liveness.TIMEOUT
    run.world.use(run.shape.inference, 100.0)
    yield from quieten(run)


def server_stopped(run: Run) -> Piece:
    """SIGSTOP: the socket accepts and nobody answers."""
    health(run, Health.TIMEOUT)
    run.world.use(run.shape.inference, 0.0)
    yield from quieten(run)


def trainer_hangs(run: Run) -> Piece:
    """Memory held, nothing runs (prime-rl #1713); the orchestrator has paused, so no request is in flight."""
    w = run.world
    run.training(False)
    yield w.rng.uniform(10.0, 60.0)
    for server in run.servers:
        server.work(w.now, 0.0, 0.0)
    w.use((*run.shape.inference, *run.shape.trainer), 0.0)


def nccl_spins(run: Run) -> Piece:
    """A collective that waits for a rank keeps its GPU at 100 %."""
    w = run.world
    w.use(run.shape.trainer, 100.0)
    yield w.rng.uniform(10.0, 60.0)
    for server in run.servers:
        server.work(w.now, 0.0, 0.0)
    w.use(run.shape.inference, 0.0)


def nccl_spins_and_aborts(run: Run) -> Piece:
    """torch's own watchdog ends it after dist_timeout_seconds, 3600 at prime-rl's HEAD."""
    yield from nccl_spins(run)
    yield 3600.0
    yield from launcher_ends(ExitStatus(1))(run)


def first_step_hangs(run: Run) -> Piece:
    """Started again by hand; everything loads, and the counters disagree."""
    w = run.world
    run.go_down(ExitStatus(143))
    w.desired = type(w.desired).STOPPED
    yield 20.0
    start = run._start()
    w.struck_at = w.now
    yield from start
    run.sampling(False)
    run.training(False)


def save_hangs(run: Run) -> Piece:
    """A volume that does not answer any more: the save never ends."""
    w = run.world
    w.saving = True
    w.use((*run.shape.inference, *run.shape.trainer), 0.0)
    for server in run.servers:
        server.work(w.now, 0.0, 0.0)
    yield from ()


def finished_and_lingers(run: Run) -> Piece:
    w = run.world
    w.finish_line = True
    w.look_again()
    run.sampling(False)
    run.training(False)
    run.hold("engine", run.shape.inference, CONTEXT)
    yield from ()


FAULTS = (
    Fault("engine dies silently", "memory 0, EngineCore gone, 503 then refused, server ends 0", engine_dies,
          SEEN_TO_END),
    Fault("server ends with code 0", "memory 0, server and engine gone, refused", server_exits, SEEN_TO_END),
    Fault("EngineCore gone, health 200", "memory 0, engine process gone", engine_core_gone, SILENT),
    Fault("memory gone, health 503", "memory 0, 503", memory_gone_503, SILENT),
    Fault("memory gone, health refused", "memory 0, refused", memory_gone_refused, SILENT),
    Fault("memory gone, nothing else", "memory 0, then steps", memory_gone_only, _steps),
    Fault("no URL, contexts unreadable", "memory 0, engine process gone", engine_core_gone, SILENT, shape=POOR),
    Fault("one of four TP ranks", "memory of one GPU 0, one worker gone", one_rank_gone, SILENT, shape=TP),
    Fault("one of two engines, router 200", "memory of one GPU 0, its server refused", one_engine_of_two,
          SEEN_TO_END,
          shape=ROUTER),
    Fault("shared GPU", "the engine's share gone, engine process gone", engine_core_gone, SILENT, shape=SHARED),
    Fault("sleep mode: memory says nothing", "engine and server gone", engine_dies, BY_CHILD, shape=SLEEPS),
    Fault("during a save", "as the first, saving", engine_dies, SEEN_TO_END, phases=("save",)),
    Fault("during an evaluation", "as the first, trainer idle", engine_dies, SEEN_TO_END, phases=("evaluate",)),
    Fault("during a weight update", "as the first, memory had fallen before", engine_dies, SEEN_TO_END,
          phases=("update",)),
    Fault("while podwatch restarts", "as the first; only learned values are known", while_podwatch_is_away,
          seconds(60.0)),
    Fault("while NVML is blind for 60 s", "engine process gone, memory seen later", while_nvml_is_blind,
          seconds(75.0)),
    Fault("NVML gone for good", "server and engine gone, GPUs blind", nvml_gone_for_good, BY_CHILD),
    Fault("API server killed, engine orphaned", "refused, memory held", server_killed, BY_CHILD),
    Fault("server ends while it loads", "server gone, refused as before", server_exits_while_loading, BY_CHILD,
          phases=("load",), after=30.0),
    Fault("launcher: exit code 1", "exit known", launcher_ends(ExitStatus(1)), seconds(5.0), (Kind.TRAINER_EXITED,)),
    Fault("launcher: exit code 0, no target", "exit 0", launcher_ends(ExitStatus(0)), seconds(5.0),
          (Kind.TRAINER_EXITED,)),
    Fault("launcher: OOM kill", "signal 9, oom_kill counter", launcher_ends(ExitStatus(signal=9), oom=True),
          seconds(5.0), (Kind.TRAINER_EXITED,)),
    Fault("launcher killed, engine lives on", "signal 9, memory held",
          launcher_ends(ExitStatus(signal=9), leaving=(ProcessRole.ENGINE,)), seconds(5.0), (Kind.TRAINER_EXITED,)),
    Fault("launcher: attached, exit unknown", "gone", launcher_ends(ExitStatus()), seconds(130.0),
          (Kind.TRAINER_EXITED,), shape=ATTACHED),
    Fault("launcher: attached, engine dies silently", "as the first; its operator has 2 min", engine_dies,
          seconds(150.0), shape=ATTACHED),
    Fault("launcher: attached, only the engine goes", "memory 0, engine process gone", engine_core_gone,
          seconds(145.0), shape=ATTACHED),
    Fault("launcher: ended by SIGINT", "signal 2; its operator has 2 min", launcher_ends(ExitStatus(signal=2)),
          seconds(130.0), (Kind.TRAINER_EXITED,)),
    Fault("launcher: exit while it loads", "exit 1 before any step", launcher_ends(ExitStatus(1)), seconds(5.0),
          (Kind.TRAINER_EXITED,), phases=("load",), after=10.0),
    Fault("orchestrator gone", "its process, then steps", orchestrator_gone, _steps, (Kind.REQUIRED_CHILD_EXITED,
          Kind.HANG)),
    Fault("trainer process gone", "its process and its memory; the others may follow for 70 s", trainer_gone,
          seconds(85.0), (Kind.REQUIRED_CHILD_EXITED,)),
    Fault("trainer process gone, its GPUs not known", "its process, then steps", trainer_gone, _idle,
          (Kind.REQUIRED_CHILD_EXITED, Kind.HANG), shape=SHARED),
    Fault("engine hangs, health 200", "requests run, tokens flat, then steps", engine_hangs, _hang, (Kind.HANG,)),
    Fault("engine hangs, only /liveness tells", "503 at /liveness, then steps", engine_hangs_liveness, _hang,
          (Kind.HANG, Kind.SILENT_DEATH)),
    Fault("server stopped (SIGSTOP)", "health times out, then steps", server_stopped, _hang, (Kind.HANG,)),
    Fault("trainer hangs, GPUs idle", "all idle, no request, then steps", trainer_hangs, _idle, (Kind.HANG,)),
    Fault("trainer hangs, NCCL spins", "no step; GPUs at 100 %: warned, not restarted", nccl_spins, _hang,
          (Kind.HANG,), Verdict.NONE),
    Fault("NCCL spins, torch aborts after 1 h", "exit code 1", nccl_spins_and_aborts, seconds(3700.0),
          (Kind.TRAINER_EXITED, Kind.HANG)),
    Fault("first step after a restart hangs", "no step, all idle", first_step_hangs, _patience, (Kind.HANG,)),
    Fault("save hangs", "saving for ever, all idle", save_hangs, _save, (Kind.HANG,), phases=WORKING),
    Fault("finished, processes linger", "finish line, no exit", finished_and_lingers, seconds(1300.0),
          (Kind.FINISHED,), Verdict.FINISH),
    Fault("GPU lost", "NVML_ERROR_GPU_IS_LOST", gpu_lost, seconds(5.0), (Kind.GPU_LOST,), Verdict.NONE),
    Fault("NVML hangs, run healthy", "no answer", nvml_hangs, seconds(45.0), (Kind.SENSOR_BLIND,), Verdict.NONE),
)  # fmt: skip


def strike(run: Run, fault: Fault) -> Run:
    """The fault strikes at a random moment after ``fault.after`` seconds, in one of its phases."""
    run.world.add(
        _strike(run, fault), "fault", fault.after + run.world.rng.uniform(0.0, 900.0 if fault.after > 100 else 20.0)
    )
    return run


def _strike(run: Run, fault: Fault) -> Piece:
    w = run.world
    while run.phase not in fault.phases:
        yield w.rng.uniform(0.1, 0.9)
    yield w.rng.uniform(0.0, 2.0)  # anywhere between two polls
    w.struck_at = w.now
    w.drop("life")
    w.saving = run.phase == "save"
    yield from fault.strike(run)


def shape_for(fault: Fault) -> Shape:
    """The fault's kind of pod, without a person in between, and with every phase often enough."""
    return replace(
        fault.shape, person=0.0, reload=0.0, long_save=0.0, evaluation=0.3 if "evaluate" in fault.phases else 0.05,
        evaluation_seconds=(120.0, 600.0), tool_seconds=(20.0, 400.0), long_update=0.0,
    )  # fmt: skip
