"""Builds the components of one daemon and connects them, one function for each subject. Starts nothing."""

import secrets
from dataclasses import replace
from pathlib import Path

from podwatch.app import held_back_findings
from podwatch.app.ask_and_record_attempts import make_verdicts
from podwatch.app.backup.run_side import WandbIds
from podwatch.app.checkpoint_loop import Rescans
from podwatch.app.components import (
    Checkpoints,
    Choices,
    Components,
    Deletion,
    Foundation,
    Run,
    Store,
    Training,
)
from podwatch.app.held_back_findings import Implausible, TwoWriters
from podwatch.app.nodes import make_gang, own_place
from podwatch.app.paths_and_run_lock import workspace_of
from podwatch.app.replaced_directories import RootWatch
from podwatch.app.sensing_loop import Sensors
from podwatch.app.sensor_wiring import build_sensing
from podwatch.app.settings_in_force import Configuration, learn_secrets, policies_from
from podwatch.app.state_check import Exits, StateCheck
from podwatch.app.store_wiring import no_backup
from podwatch.checkpoints.file_events import Watcher
from podwatch.checkpoints.held_back import HeldBack
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.settle_time import capabilities_of
from podwatch.checkpoints.trainers import make_layout, process_names, restart_concerns
from podwatch.config.settings import Settings
from podwatch.disk.leftovers import Measurements
from podwatch.disk.remove import Remover
from podwatch.domain.engine_and_attempt import Place
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.run_state import RunState
from podwatch.domain.secrets import register
from podwatch.recovery.context import RecoveryContext
from podwatch.recovery.environment import TrainingEnvironment
from podwatch.recovery.failure import Failures
from podwatch.recovery.recovery import Recovery
from podwatch.recovery.run_file import LOAD_SECONDS, RunFile
from podwatch.recovery.state import RunFiles, RunStore, Tools, TrainerSensors
from podwatch.sensors.processes import ProcessSensor
from podwatch.system.blocking_calls import Worker
from podwatch.system.files import ReservedSpace
from podwatch.system.own_directories import Workspace
from podwatch.trainer.find import sought_run
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.start_and_adopt import SupervisorLauncher, SupervisorOptions

MORE_SECONDS = 5.0
"""As PID 1, init gives training 3 s beyond ``preempt_grace``, once the daemon has ended."""
QUARANTINE_SECONDS = 7 * 86400.0
"""Quarantined checkpoints are kept for a week, unless the disk needs the space and a verified successor exists."""


def build(settings: Settings, foundation: Foundation, choices: Choices) -> Components:
    """Build all components. Blocks: probes the disk."""
    learn_secrets(settings)
    held = held_back_findings.recalled_spans(foundation.journal.sync.learned(held_back_findings.TWO_WRITERS_KEY))
    run, missing = _run(settings, foundation, held)
    checkpoints = _checkpoints(settings, run, held, foundation.rescans)
    place = own_place(settings)
    launcher = SupervisorLauncher(
        settings.run_id,
        settings.trainer.output_dir,
        settings.state_dir,
        run.clock,
        roles=Roles(process_names(settings)),
        run=lambda: sought_run(run.config.settings, _start_ids(run)),
        # At a preemption the supervisor, too, leaves training the whole grace for its last save, and what init adds to
        # it.
        options=SupervisorOptions(
            beside=run.workspace.outside,
            several_nodes=place is not None,
            grace=max(settings.trainer.stop_grace, settings.recovery.preempt_grace + MORE_SECONDS),
            job=choices.job,
        ),
    )
    sensing = build_sensing(settings, run, checkpoints, Path(launcher.log_path()), choices.gpu_reader)
    training = _training(settings, run, checkpoints, sensing, launcher)
    checks = _checks(run, foundation, missing)
    run.guard.add(checks.blocked_reason)
    run.guard.add(lambda _mutation: checkpoints.roots.blocked_reason())
    deletion = _deletion(run)
    store = _store(settings, run, checkpoints, sensing.trainer, foundation.exits, choices)
    context = RecoveryContext(_tools(settings, run, checkpoints, sensing, training, store, place, checks.reserve))
    failures = Failures(context)
    verdicts = None
    if choices.job is not None:
        verdicts = make_verdicts(run, sensing.gpus, store.backup, context, retry=choices.retry)
    gang = None if place is None else make_gang(place, failures, store.backup, verdicts)
    if gang is not None and not gang.leads:
        run.guard.add(gang.blocked_reason)
    recovery = Recovery(context, failures, gang)
    return Components(run, checkpoints, sensing, training, recovery, store, deletion, checks, gang, verdicts)


def _start_ids(run: Run) -> tuple[str, ...]:
    last = run.file.current.last_start
    return () if last is None else (last.start_id,)


def _run(settings: Settings, foundation: Foundation, held: HeldBack) -> tuple[Run, str]:
    """The run, and why its workspace cannot be written, else empty."""
    trainer = settings.trainer
    layout = make_layout(settings)
    policies = policies_from(
        settings,
        max_steps=_target(layout, trainer.command),
        save_interval=layout.save_interval(trainer.command),
    )
    workspace, missing = _workspace(workspace_of(settings))
    config = Configuration(settings, policies, restart_concerns(settings, layout))
    paths, clock = foundation.paths, foundation.clock
    file = RunFile(paths.state, workspace, settings.run_id, clock, held.follow)
    file.load_within(LOAD_SECONDS)
    file.note(_named)
    return Run(foundation, config, layout, workspace, file), missing


def _checkpoints(settings: Settings, run: Run, held: HeldBack, rescans: Rescans) -> Checkpoints:
    layout, workspace = run.layout, run.workspace
    checkpoints = settings.checkpoints
    catalogue = Catalogue(
        layout,
        run.clock,
        settle=checkpoints.settle,
        settle_weak=checkpoints.settle_weak,
        settle_tracker=checkpoints.settle_tracker,
        records=run.records,
        held_back=held,
        tree=workspace.tree,
    )
    return Checkpoints(
        catalogue=catalogue,
        capabilities=capabilities_of(workspace.outside),
        roots=RootWatch(workspace, run.clock),
        watcher=Watcher(catalogue.watch_dirs, rescans.wake_from_thread, warn=run.emit.warn),
        rescans=rescans,
        held=held,
        implausible=Implausible(held),
        measurements=Measurements(workspace, layout, keep_seconds=QUARANTINE_SECONDS),
        worker=Worker("checkpoints"),
    )


# -- state, store, recovery, deletion --------------------------------------------------------------------------------


def _checks(run: Run, foundation: Foundation, missing: str) -> StateCheck:
    return StateCheck(
        run.file,
        run.journal.sync,
        run.workspace,
        run.clock,
        lock=foundation.lock,
        emit=run.emit,
        exits=foundation.exits,
        missing=missing,
    )


def _store(
    settings: Settings,
    run: Run,
    checkpoints: Checkpoints,
    processes: ProcessSensor,
    exits: Exits,
    choices: Choices,
) -> Store:
    wandb = WandbIds(run.layout)
    refused = no_backup(settings, choices.same_disk_store)
    if settings.nodes.rank:
        return Store(None, None, "", wandb, elsewhere=True)
    if not settings.sync.store or refused:
        return Store(None, None, refused, wandb)
    from podwatch.app.store_wiring import make_backup, make_restore  # a daemon without a store does not need it

    backup = make_backup(settings, run, checkpoints.catalogue, processes, exits, wandb, checkpoints.rescans, choices)
    return Store(backup, make_restore(settings, run, backup, "restore"), refused, wandb)


def _training(
    settings: Settings, run: Run, checkpoints: Checkpoints, sensing: Sensors, launcher: SupervisorLauncher
) -> Training:
    token = run.file.current.ping_token
    register(token)
    return Training(
        launcher=launcher,
        environment=TrainingEnvironment(token),
        two_writers=TwoWriters(
            settings,
            run.layout,
            checkpoints.held,
            roles=Roles(process_names(settings)),
            clock=run.clock,
            journal=run.journal.sync,
            processes=sensing.trainer,
        ),
    )


def _tools(
    settings: Settings,
    run: Run,
    checkpoints: Checkpoints,
    sensing: Sensors,
    training: Training,
    store: Store,
    place: Place | None,
    reserve: ReservedSpace,
) -> Tools:
    return Tools(
        settings=settings,
        policies=run.config.policies,
        clock=run.clock,
        journal=run.journal,
        emit=run.emit,
        launcher=training.launcher,
        run=RunFiles(run.layout, checkpoints.catalogue, run.workspace, run.file, run.files_clock),
        sensors=TrainerSensors(sensing.gpus, sensing.trainer, sensing.progress, sensing.inference),
        environment=training.environment,
        store=RunStore(store.restore, store.backup),
        place=place,
        guard=run.guard,
        reserve=reserve,
    )


def _deletion(run: Run) -> Deletion:
    return Deletion(Remover(run.workspace, run.clock, run.emit, run.guard), Worker("removals"))


# -- parts of the configuration --------------------------------------------------------------------------------------


def _workspace(found: Workspace) -> tuple[Workspace, str]:
    """The probed workspace, or the unprobed one with the reason: podwatch guards, but starts nothing."""
    try:
        return found.probe(), ""
    except HostError as error:
        return found, str(error)


def _named(run: RunState) -> RunState:
    """With the random names of this run on this pod, made once; the next edit records them."""
    return replace(
        run, writer_id=run.writer_id or secrets.token_hex(16), ping_token=run.ping_token or secrets.token_hex(16)
    )


def _target(layout: Layout, command: tuple[str, ...]) -> int | None:
    try:
        return layout.target_step(command)
    except (PodwatchError, OSError):
        return None
