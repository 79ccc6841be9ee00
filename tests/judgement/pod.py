"""A pod made of numbers: generates snapshots of a run, healthy with all its oddities, or struck at a given second."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.reading import Reading, SensorState, observed, unobserved
from podwatch.domain.snapshot import (
    DiskSample,
    GpuSample,
    Health,
    InferenceSample,
    ProgressSample,
    ProgressSource,
    Snapshot,
    Supervision,
    TrainerSample,
)

GIB = 1 << 30


def process(pid: int, role: ProcessRole, gpus: tuple[int, ...] = (), cuda: bool | None = None) -> ProcessSample:
    held = bool(gpus) if cuda is None else cuda
    return ProcessSample(ProcessIdentity(pid, pid * 10), 1, role.value, role.value, role, "S", held, frozenset(gpus))


LAUNCHER = process(10, ProcessRole.LAUNCHER)
SERVER = process(11, ProcessRole.INFERENCE)
ENGINE = process(12, ProcessRole.ENGINE, (0,))
ORCHESTRATOR = process(13, ProcessRole.ORCHESTRATOR)
TRAINER = process(14, ProcessRole.TRAINER, (1,))


@dataclass
class Oddities:
    """How often, per step, something unusual but healthy happens."""

    slow_step: float = 0.02
    evaluation: float = 0.02
    swap: float = 0.2
    sleep: float = 0.02
    blind: float = 0.01
    timeout: float = 0.02
    lone_gap: float = 0.02


@dataclass
class Pod:
    """Healthy until ``dies_at``. ``poll`` is seconds between snapshots; ``step_seconds`` the usual step.

    At its death the engine loses its memory; ``engine_process``, ``server`` say what else goes with it.
    """

    seed: int
    poll: float = 2.0
    step_seconds: float = 200.0
    save_every: int = 5
    load_seconds: float = 300.0
    oddities: Oddities = field(default_factory=Oddities)
    dies_at: float | None = None
    engine_process_dies: bool = True
    server_dies_after: float = 5.0
    phase: float = 0.0
    """Offset of the polls against the clock, in seconds."""

    def snapshots(self, hours: float) -> Iterator[Snapshot]:
        rng = random.Random(self.seed)
        odd = self.oddities
        end = hours * 3600.0
        step, step_done, step_ends = 0, 0.0, self.load_seconds + self.step_seconds
        saving_until = swap_until = sleep_until = blind_until = timeout_until = quiet_until = -1.0
        swap_from = 0.0
        tokens = 0.0
        progress: tuple[ProgressSample, ...] = ()
        at = 100.0 + self.phase
        while at < 100.0 + end:
            now = at - 100.0
            dead = self.dies_at is not None and now >= self.dies_at
            if now >= step_ends and not dead:
                step, step_done = step + 1, now
                progress = (ProgressSample(ProgressSource.STEP_LINE, "trainer", at, step),)
                length = self.step_seconds * rng.uniform(0.7, 1.4)
                if rng.random() < odd.slow_step:
                    length = self.step_seconds * 5
                if rng.random() < odd.evaluation:
                    quiet = rng.uniform(300, 1200)
                    length, quiet_until = length + quiet, now + quiet
                if step % self.save_every == 0:
                    saving_until = now + rng.uniform(20, 400)
                    length += saving_until - now
                if rng.random() < odd.swap:
                    swap_from = now + rng.uniform(1, 20)
                    swap_until = swap_from + rng.uniform(0.5, 6.0)
                if rng.random() < odd.sleep:
                    sleep_until = now + rng.uniform(20, 90)
                if rng.random() < odd.blind:
                    blind_until = now + rng.uniform(4, 120)
                if rng.random() < odd.timeout:
                    timeout_until = now + rng.uniform(4, 60)
                step_ends = now + length
            loaded = now >= self.load_seconds * 0.5
            memory0 = 60 * GIB if loaded else int(60 * GIB * now / self.load_seconds)
            if swap_from <= now < swap_until or now < sleep_until or dead:
                memory0 = 300 << 20
            busy = not dead and now >= quiet_until and now > self.load_seconds
            if busy:
                tokens += rng.uniform(100, 5000)
            gpus: Reading[tuple[GpuSample, ...]] = observed(
                (
                    GpuSample(
                        0,
                        "a",
                        "H100",
                        memory_used_bytes=memory0,
                        memory_total_bytes=80 * GIB,
                        utilization_percent=80.0 if busy else 0.0,
                    ),
                    GpuSample(
                        1,
                        "b",
                        "H100",
                        memory_used_bytes=70 * GIB,
                        memory_total_bytes=80 * GIB,
                        utilization_percent=rng.choice((0.0, 90.0)) if busy else 0.0,
                    ),
                ),
                at,
            )
            if now < blind_until:
                gpus = unobserved(SensorState.BLIND, at, "NVML did not answer")
            since_death = now - self.dies_at if dead and self.dies_at is not None else -1.0
            server_gone = dead and since_death >= self.server_dies_after
            engine_gone = dead and self.engine_process_dies
            processes = [LAUNCHER, ORCHESTRATOR, TRAINER]
            if loaded and not engine_gone:
                processes.append(ENGINE)
            if not server_gone:
                processes.append(SERVER)
            health = Health.OK if now > self.load_seconds else Health.REFUSED
            if now < timeout_until:
                health = Health.TIMEOUT
            if dead:
                health = Health.REFUSED if server_gone else Health.UNHEALTHY if engine_gone else Health.OK
            running = 0.0 if now < quiet_until else 16.0
            yield Snapshot(
                at=at,
                wall=1_700_000_000 + at,
                gpus=gpus,
                trainer=observed(
                    TrainerSample(
                        "start-1", Supervision.KEEPER, True, 100.0, LAUNCHER.identity, None, tuple(processes)
                    ),
                    at,
                ),
                disk=observed(DiskSample("/", 1000, 500, 500, 100, 50), at),
                inference=observed((InferenceSample("http://127.0.0.1:8000", health, None, running, tokens),), at),
                progress=observed(progress, at),
                saving=now < saving_until,
            )
            at += self.poll * rng.uniform(0.95, 1.1)
            if rng.random() < odd.lone_gap / 100:
                at += rng.uniform(2, 30)  # our own loop stalled
        del step_done
