"""The kinds of pod: what hardware, what servers, what podwatch can see of it, and how its steps go.

Sizes and times follow facts/prime-rl.md and facts/peers.md section 1: steps of 3 to 5 minutes, 47 GB saves, start-ups
of minutes to an hour. ``SHAPES`` is what the figures are made of; every field is one way in which pods differ.
"""

from dataclasses import dataclass

from tests.drivers.detection import Policies, ProgressSource, Supervision, judging

Span = tuple[float, float]
"""Least and most, in seconds."""
STEP, MARK, SAVE, PING = (
    ProgressSource.STEP_LINE, ProgressSource.MARKER, ProgressSource.CHECKPOINT, ProgressSource.HEARTBEAT,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    step_seconds: float = 200.0
    cards: int = 2
    inference: tuple[int, ...] = (0,)
    trainer: tuple[int, ...] = (1,)
    foreign: tuple[int, ...] = ()
    """GPUs of the same machine on which somebody else works."""
    trainer_configured: bool = True
    engines: int = 1
    """Servers, the inference GPUs divided among them; with several a router stands before them."""
    synchronous: bool = False
    """The engine waits while the trainer trains."""
    load: Span = (60.0, 600.0)
    compile: Span = (5.0, 240.0)
    slow_step: float = 0.02
    save_every: int = 5
    save: Span = (20.0, 400.0)
    long_save: float = 0.02
    evaluation: float = 0.03
    evaluation_seconds: Span = (120.0, 2400.0)
    tool_bound: float = 0.05
    """Share of steps in which every rollout waits for its tools: no request runs, every GPU is idle."""
    tool_seconds: Span = (20.0, 900.0)
    update: Span = (1.0, 45.0)
    long_update: float = 0.004
    """Share of weight updates whose first try runs into prime-rl's 720 s."""
    dip: float = 0.25
    """Share of weight updates in which the engine's memory falls and comes back."""
    sleep: str = ""
    """The engine gives its memory back while the trainer trains: ``flag`` (--enable-sleep-mode is on its command
    line), ``asks`` (/is_sleeping tells), ``unsaid``."""
    urls: bool = True
    logs: bool = True
    """Its logs can be read: that no interrupt is reported counts."""
    counters: bool = True
    liveness: bool = True
    cuda: bool = True
    """Who holds a CUDA context can be read."""
    utilization: bool = True
    sources: tuple[ProgressSource, ...] = (STEP, MARK)
    supervision: Supervision = Supervision.SUPERVISED
    noise_gib: float = 0.3
    person: float = 0.03
    """Restarts by a person, per hour."""
    reload: float = 0.06
    """Times that the engine, or its whole server, is replaced by a new one, per hour."""
    trouble: float = 1.0
    """How often, against the usual, sensors, clocks and podwatch itself have trouble."""

    @property
    def shared(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.inference) & set(self.trainer)))

    def policies(self) -> Policies:
        """The defaults, and the GPUs."""
        return judging(gpu__inference=self.inference, gpu__trainer=self.trainer if self.trainer_configured else ())


SHAPES = (
    Shape("two GPUs, the user's own", step_seconds=240.0),
    Shape("short steps", step_seconds=20.0, save_every=50, person=0.1),
    Shape("very short steps", step_seconds=3.0, save_every=200, load=(20.0, 60.0), long_update=0.0),
    Shape("long steps", step_seconds=900.0, compile=(60.0, 1800.0), save=(200.0, 1500.0)),
    Shape("TP over 4 GPUs, trainer on 4", cards=8, inference=(0, 1, 2, 3), trainer=(4, 5, 6, 7), step_seconds=300.0),
    Shape("2 of 8 GPUs, others work on the rest", cards=8, inference=(2,), trainer=(3,), foreign=(0, 1, 4, 5, 6, 7)),
    Shape("router and two engines", cards=4, inference=(0, 1), trainer=(2, 3), engines=2),
    Shape("colocated, no sleep", cards=1, inference=(0,), trainer=(0,), synchronous=True, noise_gib=1.0),
    Shape("colocated, sleep mode by flag", cards=2, inference=(0, 1), trainer=(0, 1), synchronous=True, sleep="flag"),
    Shape("sleep mode that /is_sleeping tells", synchronous=True, sleep="asks", step_seconds=120.0),
    Shape("sleep mode that nobody tells", synchronous=True, sleep="unsaid", step_seconds=150.0),
    Shape("tool-bound rollouts", tool_bound=0.6, tool_seconds=(30.0, 1200.0), synchronous=True, step_seconds=300.0),
    Shape("no server asked, contexts unreadable", urls=False, cuda=False, logs=False, trouble=2.0),
    Shape("only checkpoints tell progress", sources=(SAVE,), step_seconds=100.0, counters=False, liveness=False),
    Shape("attached, GPUs without utilisation", supervision=Supervision.ATTACH, utilization=False, person=0.1),
    Shape("attached, pings only, trainer's GPUs unknown", supervision=Supervision.ATTACH, sources=(PING,),
          trainer_configured=False, trouble=2.0),
    Shape("a restless pod", noise_gib=3.0, dip=0.8, trouble=6.0, person=0.3, slow_step=0.08, evaluation=0.1),
)  # fmt: skip
