"""A small pod for recovery tests: real directories, real child processes, and a place where everything can be killed.

The launcher here plays the supervisor: what it knows outlives the podwatch that used it, and it never allows a second
trainer. The real supervisor has its own tests; here it is the order of acts that is tested.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import MappingProxyType, SimpleNamespace
from typing import Any, Protocol

from podwatch.checkpoints.command import without_settings
from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.second_writer import ALONE, Beside
from podwatch.checkpoints.shapes import PartDir, PartFiles, ResumeCommand, StepSeen, Tracker
from podwatch.checkpoints.trainer import Trainer
from podwatch.config.settings import Policies, Settings, TrainerSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness
from podwatch.domain.engine_and_attempt import Place
from podwatch.domain.errors import Busy, HostError
from podwatch.domain.event import Event
from podwatch.domain.facts import Facts
from podwatch.domain.finding import Finding, FindingKind, Severity, Verdict
from podwatch.domain.process import (
    ExitStatus,
    FoundTree,
    PodProcess,
    ProcessIdentity,
    ProcessRole,
    ProcessSample,
    TreeAnswer,
    attached_id,
)
from podwatch.domain.quarantine_index import QuarantineIndex
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import (
    GpuSample,
    ProgressSample,
    ProgressSource,
    Reading,
    SensorState,
    Snapshot,
    Supervision,
    TrainerSample,
    observed,
    unobserved,
)
from podwatch.domain.starts import Recorded
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.journal import AsyncJournal, Journal
from podwatch.recovery import Phase, Recovery, RunFile, quarantine
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.failure import Failures
from podwatch.recovery.run_file import Change, parse
from podwatch.recovery.state import RunFiles, RunStore, Tools, TrainerSensors
from podwatch.store.documents import SaveManifest
from podwatch.store.inventory import Stored
from podwatch.store.restore.inspect_staged import StagedDamaged
from podwatch.store.restore.restore import Restored
from podwatch.system.files_clock import FilesClock
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import command, identify
from podwatch.trainer.start_and_adopt import Look, StartPlan
from podwatch.trainer.trainer_handle import StopReport, TrainerHandle
from tests.support.clock import AutoClock

GIB = 1 << 30


class Killed(BaseException):
    """podwatch was SIGKILLed here: no handler of its own may run after it."""


class Killer:
    """Counts the points at which a kill is possible; at ``target`` it strikes, and from then on nothing works."""

    def __init__(self, target: int = 0, at: str = "") -> None:
        self.target, self.at, self.count, self.dead, self.where = target, at, 0, False, ""

    def point(self, name: str) -> None:
        if self.dead:
            raise Killed(name)
        self.count += 1
        if self.count == self.target or name == self.at:
            self.dead, self.where = True, name
            raise Killed(name)


class Handle:
    ended, terminal_used, record = MappingProxyType[tuple[int, int], ExitStatus]({}), None, None

    def __init__(self, world: "World", start_id: str, process: subprocess.Popen[bytes], supervision: Supervision):
        identity = identify(process.pid)
        assert identity is not None
        self.world, self.start_id, self.process, self.supervision = world, start_id, process, supervision
        self.warnings: tuple[str, ...] = ()
        self.launcher: ProcessIdentity = identity
        self.started_wall = world.clock.wall()
        self.began = world.clock.boottime()
        self.released = False
        self.point: Callable[[str], None] = lambda _: None

    @property
    def age(self) -> float:
        return self.world.clock.boottime() - self.began

    async def exit_status(self) -> ExitStatus | None:
        code = self.process.poll()
        if code is None:
            return None
        return ExitStatus(code=code) if code >= 0 else ExitStatus(signal=-code)

    async def tree(self, *, sweep: bool = False) -> Reading[tuple[ProcessSample, ...]]:
        lives = self.process.poll() is None
        one = ProcessSample(self.launcher, 1, "sh", "sh", ProcessRole.LAUNCHER)
        return observed((one,) if lives else (), self.world.clock.now)

    async def stop(
        self, *, grace: float, save_grace: float, saving: Callable[[], bool], max_kill_wait: float = 30.0
    ) -> StopReport:
        self.point("stop")
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            while self.process.poll() is None:
                await asyncio.sleep(0.002)
        self.point("stopped")
        return StopReport(0.1, 1, (), await self.exit_status())

    def ask_to_end(self) -> bool:
        return False

    async def release(self) -> None:
        self.point("release")
        self.released = True
        self.point("released")


class WorldLauncher:
    """One podwatch's view of the world's launcher."""

    def __init__(self, world: "World", killer: Killer) -> None:
        self.world, self.killer = world, killer

    async def look(self) -> Look:
        self.killer.point("look")
        handle = self.world.kept
        if handle is not None and handle.released:
            handle = None
        if handle is not None:
            handle.point = self.killer.point
        trees = self.world.trees
        living = [t for t in trees if t.trains or self.world.foreign[t.launcher.pid].poll() is None]
        return Look(handle, tuple(living), stoppable=self.world.stoppable)

    async def attach(self, launcher: ProcessIdentity) -> Handle:
        process = self.world.foreign[launcher.pid]
        handle = Handle(self.world, attached_id(launcher), process, Supervision.ATTACH)
        handle.started_wall = self.world.started[launcher.pid]
        handle.began -= self.world.clock.wall() - handle.started_wall
        handle.point = self.killer.point
        self.world.trees = [tree for tree in self.world.trees if tree.launcher != launcher]
        return handle

    async def start(self, plan: StartPlan) -> Handle:
        self.killer.point("start")
        world = self.world
        if world.kept is not None and not world.kept.released:
            raise Busy("another supervisor holds the run")
        if world.start_error:
            raise world.start_error if isinstance(world.start_error, Exception) else HostError(world.start_error)
        world.alive_check()
        world.plans.append(plan)
        handle = world.launch(plan.start_id)
        handle.point = self.killer.point
        await asyncio.sleep(0)
        self.killer.point("started")
        return handle

    def log_path(self) -> str:
        return ""

    async def close(self) -> None: ...


class FlatLayout:
    """``checkpoints/step_N`` with three files; ``done`` is the marker. ``notes/step_N`` must go with it."""

    name, variant, finish_lines = "flat", "", ()
    trainer = Trainer("flat")
    reshards, counts_all, counts_saves = True, True, False
    saved_by: int | None = None
    started: int | None = None
    """Processes that wrote each set, and that the command starts."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir

    def watch_roots(self) -> tuple[Path, ...]:
        return (self.output_dir / "checkpoints",)

    def numbers(self, kind: str) -> list[int]:
        root = self.output_dir / kind
        return sorted(int(p.name[5:]) for p in root.glob("step_*")) if root.is_dir() else []

    def part_dir(self, part: str, step: int) -> Path:
        return self.output_dir / part / f"step_{step}"

    def steps(self) -> Mapping[int, tuple[PartDir, ...]]:
        return {
            n: (PartDir("checkpoints", self.part_dir("checkpoints", n), True),) for n in self.numbers("checkpoints")
        }

    def judge(self, step: int, parts: Sequence[PartFiles], known: object = None) -> Inspection:
        return Inspection(InspectionOutcome.WHOLE, world_size=self.saved_by)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        first = -1 if step is None else step + 1
        return tuple(
            self.part_dir(kind, n) for kind in ("checkpoints", "notes") for n in self.numbers(kind) if n >= first
        )

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        """``latest`` and the link ``newest``, in runs that have them."""
        root = self.output_dir / "checkpoints"
        found = []
        if step is not None and (root / "latest").exists():
            found.append(Tracker(root / "latest", content=str(step).encode()))
        if step is not None and (root / "newest").is_symlink():
            found.append(Tracker(root / "newest", target=f"step_{step}"))
        return tuple(found)

    def progress(self) -> tuple[StepSeen, ...]:
        return ()

    def resume_command(
        self, command: Sequence[str], step: int | None, override: str | Sequence[str], wandb: Mapping[str, str]
    ) -> ResumeCommand:
        kept, removed = without_settings(command, ("--resume",))
        argv = kept + (("--resume", str(step)) if step is not None else ())
        return ResumeCommand(argv, {"WANDB_RUN_ID": "w1"}, removed)

    def step_paths(self, step: int) -> tuple[Path, ...]:
        return (self.part_dir("checkpoints", step),)

    def first_step_after(self, step: int) -> int:
        return 0 if self.counts_saves else step + 1

    def processes(self, command: Sequence[str]) -> int | None:
        return self.started

    def target_step(self, command: Sequence[str]) -> int | None:
        return None

    def wandb_variables(self) -> tuple[str, ...]:
        return ()

    def wandb_identity(self) -> Mapping[str, str]:
        return {}

    def log_globs(self) -> tuple[str, ...]:
        return ()


class FlatCatalogue:
    def __init__(self, layout: FlatLayout, world: "World") -> None:
        self.layout, self.world = layout, world
        self.held = HeldBack()
        self._found: tuple[CheckpointSet, ...] = ()
        self.saving = False
        self.out_of_reach: frozenset[int] = frozenset()
        self.unlisted = ""

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        records: Any = SimpleNamespace(all=(), decided={}, doubted=set(), restored=set(), origins=self.world.origins)
        return self.held.mark(self._found, records)

    def rescan(self, *, writers_ended: bool = False, list_again: bool = False) -> tuple[CheckpointSet, ...]:
        if self.unlisted:
            return self.sets
        found = []
        for step in self.layout.numbers("checkpoints"):
            path = self.layout.part_dir("checkpoints", step)
            done = (path / "done").exists() and (path / "b.bin").exists()
            state = Completeness.COMPLETE if done else Completeness.INCOMPLETE
            wall = self.world.set_walls.get(step, self.world.clock.wall())
            left = 0.0 if writers_ended else self.world.settles_at.get(step, 0.0) - self.world.clock.monotonic()
            if done and left > 0:
                writing = Completeness.WRITING
                found.append(CheckpointSet(step, "flat", writing, (), 10, 3, wall, "", "whole", settles_in=left))
                continue
            save_id = f"save{step}-{self.world.set_walls.get(step, 0.0)}" if done else ""
            began = self.world.began_walls.get(step, wall)
            found.append(CheckpointSet(step, "flat", state, (), 10, 3, wall, save_id, "x", began_wall=began))
        self._found = tuple(found)
        return self.sets

    def verify(self, step: int) -> tuple[str, ...]:
        return self.world.damaged.get(step, ())

    def record_starts(self) -> None:
        for found in self.sets:
            if found.complete and found.start_id and found.step in self.world.set_walls:
                self.world.origins.setdefault((found.step, found.save_id), Recorded(found.start_id))


class WorldTime(FilesClock):
    """The files' times are the world's, too."""

    def now(self) -> float:
        return self._clock.wall()


class KillableJournal(AsyncJournal):
    def __init__(self, journal: Journal, killer: Killer) -> None:
        super().__init__(journal)
        self.killer = killer

    async def run(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        self.killer.point(f"before {method.__name__}")
        result = await super().run(method, *args, **kwargs)
        self.killer.point(f"after {method.__name__}")
        return result


class KillableRunFile(RunFile):
    def __init__(self, world: "World", workspace: Workspace, killer: Killer, held: HeldBack) -> None:
        directory = world.root / "state"
        super().__init__(directory, workspace, "r1", world.clock, held.follow)
        self.killer = killer

    def edit_now(self, change: Change, decided: threading.Semaphore | None = None) -> RunState:
        self.killer.point("before record")
        state = super().edit_now(change, decided)
        self.killer.point("after record")
        return state


class Gpus:
    name = "gpu"

    def __init__(self, world: "World") -> None:
        self.world = world

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    def latest(self) -> Reading[tuple[GpuSample, ...]]:
        now = self.world.clock.now
        if self.world.gpu_used is None:
            return unobserved(SensorState.ABSENT, now, "no GPU")
        return observed(
            (GpuSample(0, "u", "n", memory_used_bytes=self.world.gpu_used, memory_total_bytes=80 * GIB),), now
        )


@dataclass
class FlatSensors:
    """Reads ``World.lines``."""

    world: "World"
    tails: Callable[[], Mapping[str, Sequence[str]]]

    def watch(self, handle: TrainerHandle | None) -> None: ...

    def begin_start(self, wall: float, start_id: str = "") -> None: ...

    def last_lines(self, n: int = 30) -> list[str]:
        return self.world.lines[-n:]

    def log_tails(self) -> Mapping[str, Sequence[str]]:
        return self.tails()


class Writers(Protocol):
    @property
    def beside(self) -> Beside: ...


class FlatEnvironment:
    def __init__(self) -> None:
        self.variables = {"HOME": "/root", "HF_TOKEN": "hf_secretsecretsecret1"}

    def build(self, _trainer: TrainerSettings) -> dict[str, str]:
        return dict(self.variables)


@dataclass
class FlatServers:
    needed: tuple[int, ...]

    def ports(self) -> tuple[int, ...]:
        return self.needed


class Even(Random):
    """No jitter: the middle of the range."""

    def random(self) -> float:
        return 0.5


class AgelessClock(AutoClock):
    """Real processes have no age by it, however short this machine has been up: a test moves it by hours."""

    def boottime(self) -> float:
        return self.now - 1e9


@dataclass
class World:
    """The pod. ``kept`` is the trainer under "the supervisor", ``foreign`` those that a person started."""

    root: Path
    clock: AutoClock = field(default_factory=AgelessClock)
    kept: Handle | None = None
    trees: list[FoundTree] = field(default_factory=list)
    stoppable: frozenset[ProcessIdentity] = frozenset()
    foreign: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: dict[int, float] = field(default_factory=dict)
    """Epoch second at which each of them was started."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    plans: list[StartPlan] = field(default_factory=list)
    set_walls: dict[int, float] = field(default_factory=dict)
    began_walls: dict[int, float] = field(default_factory=dict)
    origins: dict[tuple[int, str], Recorded] = field(default_factory=dict)
    """What the records say of who wrote a checkpoint that has a time of its own."""
    settles_at: dict[int, float] = field(default_factory=dict)
    """Step -> monotonic second from which a whole set counts as complete."""
    damaged: dict[int, tuple[str, ...]] = field(default_factory=dict)
    gpu_used: int | None = None
    start_error: str | Exception = ""
    lines: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    settings_extra: dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.root / "outputs"

    def launch(self, start_id: str, script: str = "sleep 1000") -> Handle:
        process = subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True)
        self.processes.append(process)
        self.kept = Handle(self, start_id, process, Supervision.SUPERVISED)
        return self.kept

    def person_starts(
        self, *flags: str, age: float = 0.0, answer: TreeAnswer = TreeAnswer.ATTACH, attachable: bool = True
    ) -> FoundTree:
        process = subprocess.Popen(["/bin/sh", "-c", "sleep 1000; true", "train", *flags], start_new_session=True)
        self.processes.append(process)
        while not command(process.pid):  # the exec closes Popen's pipe shortly before the new arguments can be read
            assert process.poll() is None
            time.sleep(0.001)
        identity = identify(process.pid)
        assert identity is not None
        top = PodProcess(identity, 1, "python", ("python", "train.py"), age=age, cuda=False)
        tree = FoundTree(top, answer, "holds gpu0", trains=answer is TreeAnswer.ATTACH, attachable=attachable)
        self.foreign[process.pid] = process
        self.started[process.pid] = self.clock.wall() - age
        self.trees.append(tree)
        return tree

    def alive(self) -> list[int]:
        return [p.pid for p in self.processes if p.poll() is None]

    def alive_check(self) -> None:
        assert self.alive() == [], "a second trainer was about to start"

    def kill(self) -> None:
        """The trainer dies by itself."""
        assert self.kept is not None
        os.killpg(self.kept.process.pid, signal.SIGKILL)
        self.kept.process.wait()

    def save(self, step: int, *, whole: bool = True, wall: float | None = None) -> None:
        path = self.output / "checkpoints" / f"step_{step}"
        path.mkdir(parents=True, exist_ok=True)
        for name in ("a.bin", "b.bin"):
            (path / name).write_bytes(f"{name} of {step}".encode())
        if whole:
            (path / "done").write_text("")
        notes = self.output / "notes" / f"step_{step}"
        notes.mkdir(parents=True, exist_ok=True)
        (notes / "n.txt").write_text(str(step))
        if wall is not None:
            self.set_walls[step] = wall

    def drop(self, step: int) -> None:
        """Removed by the trainer, or by hand."""
        shutil.rmtree(self.output / "checkpoints" / f"step_{step}")

    def in_store(self, step: int, lineage: str, *, seq: int) -> StoredCheckpoint:
        return StoredCheckpoint(step, f"r{step}", lineage, 1, seq, wall=self.clock.wall() - 30)

    def contents(self) -> set[bytes]:
        """Everything below output_dir and quarantine, by content: what must never get lost."""
        roots = [self.output, self.root / ".podwatch"]
        return {
            p.read_bytes()
            for root in roots
            for p in root.rglob("*")
            if p.is_file() and p.suffix in (".bin", ".txt") and p.name != "environment.txt"
        }

    def settings(self) -> Settings:
        base: dict[str, Any] = {
            "run_id": "r1",
            "state_dir": self.root / "state",
            "trainer": {"output_dir": self.output, "command": ["/bin/train", "cfg.toml"], "layout": "hf"},
            "gpu": {"inference": [0]},
        }
        for section, values in self.settings_extra.items():
            base[section] = {**base[section], **values} if isinstance(values, dict) and section in base else values
        return Settings.model_validate(base)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Podwatch:
    """One life of podwatch in a world."""

    def __init__(self, world: World, *, killer: Killer | None = None, restore: "Store | None" = None, **kw: Any):
        self.world, self.killer = world, killer or Killer()
        self.journal = KillableJournal(
            Journal.open(world.root / "state" / "j.sqlite", wall=world.clock.wall), self.killer
        )
        layout = FlatLayout(world.output)
        self.catalogue = FlatCatalogue(layout, world)
        self.workspace = Workspace(world.output)
        self.file = KillableRunFile(world, self.workspace, self.killer, self.catalogue.held)
        with contextlib.suppress(HostError):
            self.file.load()
        self.sensors = FlatSensors(world, kw.pop("log_tails", dict))
        self.environment, servers = FlatEnvironment(), FlatServers(kw.pop("ports", ()))
        self.writers: Writers | None = kw.pop("beside", None)
        """Who else writes into output_dir; None: nobody."""
        gang: Any = kw.pop("gang", None)
        place = None if gang is None else Place(0 if gang.leads else 1, 2, "job:1")
        context = RecoveryContext(
            Tools(
                settings=world.settings(),
                policies=kw.pop("policies", Policies()),
                clock=world.clock,
                journal=self.journal,
                emit=world.events.append,
                launcher=WorldLauncher(world, self.killer),
                run=RunFiles(
                    layout,
                    self.catalogue,
                    self.workspace,
                    self.file,
                    WorldTime(self.workspace, world.output, world.clock),
                ),
                sensors=TrainerSensors(Gpus(world), self.sensors, self.sensors, servers),
                environment=self.environment,
                store=RunStore(restore, kw.pop("lease", None)),
                jitter=Even(),
                place=place,
                **kw,
            )
        )
        self.recovery = Recovery(context, Failures(context), gang)

    @property
    def run(self) -> RunState:
        """What is in force."""
        return self.file.current

    def recorded(self) -> RunState:
        """What the next podwatch would read."""
        return parse(self.file.path.read_bytes())

    async def until(self, *phases: Phase, seconds: float = 60.0) -> None:
        """Wait for a phase with no act running."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.killer.dead:
                raise Killed(self.killer.where)
            if self.recovery.state.phase in phases and not self.recovery.acting:
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"still {self.recovery.state.phase}: {self.recovery.state.detail}")

    async def quiet(self) -> None:
        """Until podwatch has decided about everything that it knows, and carries nothing out."""
        while self.recovery.acting:
            await asyncio.sleep(0.001)

    async def until_phase(self, phase: Phase, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.recovery.state.phase is not phase:
            assert time.monotonic() < deadline, f"still {self.recovery.state.phase}: {self.recovery.state.detail}"
            await asyncio.sleep(0.002)

    async def until_finding(self, summary: str, seconds: float = 60.0) -> None:
        """Until the only finding says this; empty: until there is none."""
        async with asyncio.timeout(seconds):
            while "".join(f.summary for f in self.recovery.findings()) != summary:
                await asyncio.sleep(0.001)

    def snapshot(self, *steps: int, ping: bool = False) -> Snapshot:
        clock, handle = self.world.clock, self.recovery.handle
        clock.advance(2.0)
        trainer = TrainerSample(start_id=handle.start_id if handle else "", alive=True)
        progress = tuple(ProgressSample(ProgressSource.STEP_LINE, "trainer", clock.now, n) for n in steps)
        gpus = Gpus(self.world).latest()
        return Snapshot(
            at=clock.now,
            wall=clock.wall(),
            trainer=observed(trainer, clock.now),
            gpus=gpus,
            progress=observed(progress, clock.now),
        )

    def see(self, *steps: int, finding: Finding | None = None) -> None:
        beside = ALONE if self.writers is None else self.writers.beside
        self.consider(self.snapshot(*steps), *((finding,) if finding else ()), beside=beside)

    def consider(self, snapshot: Snapshot, *findings: Finding, beside: Beside = ALONE) -> None:
        """One turn of the sensing loop."""
        self.recovery.consider(Facts(snapshot, self.run), findings, beside)

    async def die(self) -> None:
        """As SIGKILL would: nothing is written any more, the world goes on."""
        self.killer.dead = True
        task = self.recovery.task
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()
        await self.journal.close()
        self.recovery.context.tools.files.close()
        self.recovery.context.tools.evidence.close()
        self.file.close()

    async def leave(self) -> None:
        await self.recovery.close()
        await self.journal.close()
        self.file.close()


def death(kind: FindingKind = FindingKind.TRAINER_EXITED) -> Finding:
    return Finding(kind, Severity.CRITICAL, f"{kind} happened", 0.0, verdict=Verdict.RESTART, confirmed=True)


def finished() -> Finding:
    return Finding(FindingKind.FINISHED, Severity.INFO, "done", 0.0, verdict=Verdict.FINISH, confirmed=True)


def stored(step: int, save_id: str, lineage: str, seq: int, problem: str = "") -> Stored:
    """A save in the store."""
    manifest = SaveManifest("r1", step, save_id, "w", 1, 0.0, "flat", 1, (), seq=seq, lineage=lineage)
    return Stored(step, save_id, lineage, 1, seq, problem=problem, manifest=manifest)


class Store:
    """What recovery sees of a store with given saves; a fetch writes the checkpoint into its place."""

    def __init__(self, world: World, *saves: Stored, error: Exception | None = None) -> None:
        self.world, self.given, self.error = world, list(saves), error
        self.fetched: list[int] = []
        self.progress: tuple[int, int] = (12_340_000_000, 47_000_000_000)
        self.meanwhile: Callable[[], None] = lambda: None
        self.fetch_error: Exception | None = None
        self.within: float | None = None
        """Seconds that the last question was given."""

    async def saves(self, step: int | None = None, *, within: float | None = None) -> tuple[Stored, ...]:
        self.within = within
        if self.error is not None:
            raise self.error
        found = (s for s in self.given if step in (None, s.step))
        return tuple(sorted(found, key=lambda s: s.order, reverse=True))

    async def fetch_save(
        self, key: tuple[int, str], progress: Callable[[int, int], object] | None = None, *, doubts: bool = False
    ) -> Restored:
        step, save_id = key
        self.fetched.append(step)
        if self.fetch_error is not None:
            raise self.fetch_error
        if progress is not None:
            progress(*self.progress)
        self.meanwhile()
        if (damage := self.world.damaged.get(step)) and not doubts:
            raise StagedDamaged(damage[0])
        self.world.save(step, wall=5.0)
        branch = next((s.manifest.lineage for s in self.given if s.key == key and s.manifest is not None), "")
        self.world.origins[step, f"save{step}-5.0"] = Recorded("", True, branch)
        return Restored(step, save_id, "", (), 0, 0)


def begun(workspace: Workspace, index: QuarantineIndex) -> None:
    """A quarantine that was interrupted before its first move."""
    directory = quarantine.directory_of(workspace, index)
    directory.mkdir(parents=True)
    (directory / quarantine.MOVING).write_bytes(index.to_bytes())


def index_of(directory: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((directory / "index.json").read_text())
    return document
