"""Check for training that runs, leftovers of an earlier start, files that a start would quarantine, and a pause."""

from collections.abc import Iterator
from dataclasses import dataclass

from podwatch.checkpoints.trainers import process_names
from podwatch.cli.check.report import Line, Sets, in_time
from podwatch.cli.offline import recorded
from podwatch.config.settings import Settings
from podwatch.domain.errors import HostError
from podwatch.domain.finding import counted
from podwatch.domain.process import FoundTree, TreeAnswer
from podwatch.recovery import stale_files
from podwatch.system import procfs
from podwatch.system.procfs import is_alive
from podwatch.trainer.find import find_trees, sought_run
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.supervisor_files import read_record

SHOWN = 4


@dataclass(frozen=True, slots=True)
class Running:
    """The training that runs now. ``text`` is empty if there is none; ``kept``: podwatch started it."""

    text: str = ""
    kept: bool = False


def running(settings: Settings) -> Running:
    record = read_record(settings.state_dir / settings.run_id / "supervisor")
    if record is not None and is_alive(record.launcher):
        return Running(f"training is running under its supervisor (pid {record.launcher.pid})", kept=True)
    found = [tree for tree in trees(settings) if tree.answer is TreeAnswer.ATTACH]
    if len(found) != 1:
        return Running()
    return Running(f"a trainer that podwatch did not start is running (pid {found[0].launcher.pid})")


def trees(settings: Settings) -> tuple[FoundTree, ...]:
    """What may train this run, and podwatch did not start."""
    return find_trees(sought_run(settings), Roles(process_names()))


def supervise(settings: Settings, present: Running) -> Iterator[Line]:
    mode, now = settings.trainer.supervise, present.text
    seen = () if present.kept else trees(settings)
    several = [tree for tree in seen if tree.answer is TreeAnswer.ATTACH]
    if len(several) > 1:
        listed = "; ".join(f"pid {c.launcher.pid}: {c.reason}" for c in several)
        yield Line("supervise", "fail", f"several trainers could be this run's: {listed}", "stop the wrong ones")
    elif now and mode == "start" and several:
        yield Line(
            "supervise",
            "fail",
            f"{now}; with supervise = 'start' podwatch does not take it over",
            'stop it, or set supervise = "auto"',
        )
    elif now:
        yield Line("supervise", "ok", f"{mode}: {now}; `podwatch run` watches it")
    elif seen:
        listed = "; ".join(f"pid {tree.launcher.pid}: {tree.reason}" for tree in seen)
        text = f"{mode}: podwatch starts no training because this process could be the run's trainer: {listed}"
        fix = "if it is: `podwatch start --attach PID`; if not: `podwatch start --ignore PID`"
        yield Line("supervise", "warn", text, fix)
    else:
        waits = "waits for a trainer that you start" if mode == "attach" else "starts training"
        yield Line("supervise", "ok", f"{mode}: no training is running; `podwatch run` {waits}")


def leftovers(settings: Settings, now: str) -> Iterator[Line]:
    """Processes and files of an earlier start, which can make the next start hang or fail."""
    record = read_record(settings.state_dir / settings.run_id / "supervisor")
    current = record.start_id if record is not None and is_alive(record.launcher) else ""
    found = []
    for pid in procfs.all_pids():
        start = procfs.environment_value(pid, "PODWATCH_START_ID")
        if start not in (None, current) and procfs.environment_value(pid, "PODWATCH_RUN") == settings.run_id:
            status = procfs.read_stat(pid)
            if status is not None and status.state not in "ZXx":
                stuck = ", stuck in the kernel" if status.state == "D" else ""
                found.append(f"{pid} {status.name}{stuck}")
    if found:
        text = f"processes of an earlier start still running: {len(found)} ({', '.join(found[:SHOWN])})"
        yield Line("leftovers", "fail", text, "end them; `podwatch clean --gpu` ends those on a GPU")
    since = _last_start(settings)
    if not now and since is not None:
        stale = in_time(lambda: stale_files.find_stale(stale_files.owner_id(settings.trainer.user), since))
        if stale.stale:
            names = ", ".join(str(path) for path in stale.stale[:SHOWN])
            text = f"podwatch deletes {len(stale.stale)} stale files before the next start: {names}"
            yield Line("leftovers", "ok", text)
        elif stale.unseen:
            text = "podwatch cannot see whether stale vllm files are in use, so it keeps them"
            yield Line("leftovers", "warn", text, "run podwatch as root, or delete them by hand")
    if not found:
        yield Line("leftovers", "ok", "no process of an earlier start is running")


def _last_start(settings: Settings) -> float | None:
    try:
        run = recorded(settings)
    except HostError:
        return None  # the check "directories" reports it
    return run.last_start.wall if run is not None and run.last_start is not None else None


def ahead(settings: Settings, now: str, sets: Sets) -> Iterator[Line]:
    """Files ahead of the newest complete checkpoint: normal while training runs, else they make the next start hang."""
    from podwatch.checkpoints.trainers import make_layout
    from podwatch.domain.checkpoint import newest_complete

    layout = in_time(lambda: make_layout(settings))
    newest = newest_complete(sets())
    step = None if newest is None else newest.step
    paths = in_time(lambda: layout.ahead_of(step))
    what = "a fresh start" if step is None else f"step {step}, the newest complete checkpoint"
    if not paths:
        yield Line("steps", "ok", f"no files are ahead of {what}")
        return
    seen = ", ".join(f"{s.role} at step {s.step}" for s in in_time(layout.progress))
    names = ", ".join(
        str(p.relative_to(layout.output_dir)) if layout.output_dir in p.parents else str(p) for p in paths[:SHOWN]
    )
    more = ", ..." if len(paths) > SHOWN else ""
    text = (
        f"{counted(len(paths), 'entry is', 'entries are')} ahead of {what}: {names}{more}{f' ({seen})' if seen else ''}"
    )
    fix = "nothing: podwatch moves them to quarantine before it starts training; a start by hand would hang on them"
    yield Line("steps", "ok" if now else "warn", text, fix)


def paused(settings: Settings) -> Iterator[Line]:
    """A pause in effect."""
    from podwatch.daemon.pause import described

    run = recorded(settings)
    if run is not None and run.pause is not None:
        text = f"{described(run.pause)}: podwatch does not stop or start training on its own"
        yield Line("pause", "warn", text, "to end the pause: `podwatch unpause`")
