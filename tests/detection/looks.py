"""A shared-nothing pod whose every part a test can change, turn by turn: for detectors that need more than one GPU."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from tests.drivers.detection import (
    Desired,
    DetectionState,
    DiskSample,
    Finding,
    FindingKind,
    GpuSample,
    Health,
    HostSample,
    InferenceSample,
    Learned,
    LogMatch,
    Policies,
    ProcessIdentity,
    ProcessRole,
    ProcessSample,
    ProgressSample,
    ProgressSource,
    Reading,
    Snapshot,
    Supervision,
    TrainerSample,
    Verdict,
    advance,
    initial,
    judging,
    observed,
)

GIB = 1 << 30


def process(
    pid: int, role: ProcessRole, gpus: Iterable[int] = (), *, command: str = "", cuda: bool | None = None
) -> ProcessSample:
    held = frozenset(gpus)
    return ProcessSample(
        ProcessIdentity(pid, pid * 10), 1, role.value, command or role.value, role, "S",
        bool(held) if cuda is None else cuda, held,
    )  # fmt: skip


LAUNCHER = process(10, ProcessRole.LAUNCHER)
ORCHESTRATOR = process(13, ProcessRole.ORCHESTRATOR)
URL = "http://127.0.0.1:8000"


@dataclass
class World:
    """Healthy by default: engine on GPU 0, trainer on GPU 1, a step every 20 s, tokens always. Change attributes and
    call ``run``."""

    policies: Policies
    now: float = 0.0
    poll: float = 2.0
    memory: dict[int, int] = field(default_factory=lambda: {0: 60 * GIB, 1: 70 * GIB})
    use: dict[int, float | None] = field(default_factory=lambda: {0: 80.0, 1: 80.0})
    mig: frozenset[int] = frozenset()
    minors: dict[int, int] = field(default_factory=dict)
    engines: list[ProcessSample] = field(default_factory=lambda: [process(12, ProcessRole.ENGINE, (0,))])
    servers: list[ProcessSample] = field(default_factory=lambda: [process(11, ProcessRole.INFERENCE)])
    others: list[ProcessSample] = field(
        default_factory=lambda: [LAUNCHER, ORCHESTRATOR, process(14, ProcessRole.TRAINER, (1,))]
    )
    inference: dict[str, InferenceSample] = field(
        default_factory=lambda: {URL: InferenceSample(URL, Health.OK, 200, 4.0, 0.0, 0.0)}
    )
    generating: bool = True
    stepping: bool = True
    step: int = 5
    step_at: float = 0.0
    step_seconds: float = 20.0
    saving: bool = False
    start_id: str = "s1"
    trainer: dict[str, object] = field(default_factory=dict)
    readings: dict[str, Reading[object]] = field(default_factory=dict)
    """Readings that replace what the world would show."""
    host: HostSample | None = None
    logs: tuple[LogMatch, ...] = ()
    desired: Desired = Desired.RUNNING
    booted: float | None = None
    """Seconds between the boot and ``now`` = 0; None: this clock is not known."""
    learned: Learned | None = None
    state: DetectionState = field(init=False)
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        self.state = initial(self.policies, self.learned)

    def snapshot(self) -> Snapshot:
        at = self.now
        if self.stepping and at - self.step_at >= self.step_seconds:
            self.step, self.step_at = self.step + 1, at
        if self.generating:
            for url, server in self.inference.items():
                if server.generation_tokens_total is not None:
                    self.inference[url] = replace(server, generation_tokens_total=server.generation_tokens_total + 50)
        tree = (*self.others, *self.servers, *self.engines)
        sample = TrainerSample(self.start_id, Supervision.SUPERVISED, True, 0.0, LAUNCHER.identity, None, tree)
        gpus = tuple(
            GpuSample(
                i, f"u{i}", "H100", memory_used_bytes=m, memory_total_bytes=80 * GIB,
                utilization_percent=self.use.get(i), mig=i in self.mig, minor=self.minors.get(i),
            )
            for i, m in self.memory.items()
        )  # fmt: skip
        shown = Snapshot(
            at=at,
            wall=at,
            gpus=observed(gpus, at),
            trainer=observed(replace(sample, **self.trainer), at),  # type: ignore[arg-type]
            disk=observed(DiskSample("/", 100, 50, 50), at),
            inference=observed(tuple(self.inference.values()), at),
            progress=observed((ProgressSample(ProgressSource.STEP_LINE, "trainer", self.step_at, self.step),), at),
            saving=self.saving,
            desired=self.desired,
            boot_at=None if self.booted is None else at + self.booted,
            logs=observed(self.logs, at),
        )
        if self.host is not None:
            shown = replace(shown, host=observed(self.host, at))
        return replace(shown, **self.readings)  # type: ignore[arg-type]

    def turns(self, seconds: float) -> Iterator[tuple[Finding, ...]]:
        end = self.now + seconds
        while self.now < end:
            self.state, self.findings = advance(self.state, self.snapshot(), self.policies)
            yield self.findings
            self.now += self.poll

    def run(self, seconds: float) -> tuple[Finding, ...]:
        """The findings of the last turn."""
        for _ in self.turns(seconds):
            pass
        return self.findings

    def quiet(self, seconds: float) -> None:
        """So long and not one verdict."""
        for findings in self.turns(seconds):
            assert not kills(findings), kills(findings)

    def until_verdict(self, seconds: float) -> tuple[Finding, float]:
        """The first verdict that kills, and the seconds it took."""
        began = self.now
        for findings in self.turns(seconds):
            if found := kills(findings):
                return found[0], self.now - began
        raise AssertionError(f"no verdict within {seconds:g} s: {self.findings}")

    def kinds(self) -> set[FindingKind]:
        return {f.kind for f in self.findings}


def kills(findings: Iterable[Finding]) -> list[Finding]:
    return [f for f in findings if f.verdict is Verdict.RESTART and f.confirmed]


def world(learned: Learned | None = None, **detection: object) -> World:
    return World(judging(**({"gpu__inference": (0,)} | detection)), learned=learned)
