"""Check for leftovers of an earlier start, files that a start would quarantine, and podwatch's stored state."""

import os
from collections.abc import Iterator

from podwatch.cli.doctoring.common import Line, Sets, in_time
from podwatch.config.settings import Settings
from podwatch.daemon.paths import workspace_of
from podwatch.domain.counted import counted
from podwatch.domain.errors import HostError
from podwatch.journal.journal import Journal
from podwatch.journal.run_record import load_run_record
from podwatch.recovery import litter
from podwatch.system import procfs
from podwatch.system.identity import is_alive
from podwatch.trainer import find
from podwatch.trainer.records import read_record

SHOWN = 4


def running(settings: Settings) -> str:
    """The running training as text; empty if there is none."""
    record = read_record(settings.state_dir / settings.run_id / "keeper")
    if record is not None and is_alive(record.launcher):
        return f"training is running under its keeper (pid {record.launcher.pid})"
    found = candidates(settings).candidates
    return f"a trainer that podwatch did not start is running (pid {found[0].launcher.pid})" if len(found) == 1 else ""


def candidates(settings: Settings) -> find.Judged:
    run = find.run_of(settings)
    return find.judge(find.gather(run, own_pid=os.getpid()), run)


def supervise(settings: Settings, now: str) -> Iterator[Line]:
    mode = settings.trainer.supervise
    seen = find.Judged() if "keeper" in now else candidates(settings)
    several = seen.candidates
    if len(several) > 1:
        listed = "; ".join(f"pid {c.launcher.pid}: {c.reason}" for c in several)
        yield Line("supervise", "fail", f"several trainers could be this run's: {listed}", "stop the wrong ones")
    elif now and mode == "keeper" and several:
        yield Line(
            "supervise",
            "fail",
            f"{now}; with supervise = keeper podwatch does not take it over",
            'stop it, or set supervise = "auto"',
        )
    elif now:
        yield Line("supervise", "ok", f"{mode}: {now}; `podwatch run` watches it")
    elif seen.pending:
        listed = "; ".join(f"pid {c.launcher.pid}: {c.reason}" for c in seen.pending)
        text = f"{mode}: podwatch starts no training because this process could be the run's trainer: {listed}"
        fix = "if it is: `podwatch start --attach PID`; if not: `podwatch start --beside PID`"
        yield Line("supervise", "warn", text, fix)
    else:
        waits = "waits for a trainer that you start" if mode == "attach" else "starts training"
        yield Line("supervise", "ok", f"{mode}: no training is running; `podwatch run` {waits}")


def leftovers(settings: Settings, now: str) -> Iterator[Line]:
    """Processes and files of an earlier start, which can make the next start hang or fail."""
    record = read_record(settings.state_dir / settings.run_id / "keeper")
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
        stale = in_time(lambda: litter.look(litter.owner_id(settings.trainer.user), since))
        if stale.stale:
            names = ", ".join(str(path) for path in stale.stale[:SHOWN])
            text = f"podwatch deletes {len(stale.stale)} stale files before the next start: {names}"
            yield Line("leftovers", "ok", text)
        elif stale.unseen:
            text = "podwatch cannot see whether stale vllm or torchelastic files are in use, so it keeps them"
            yield Line("leftovers", "warn", text, "run podwatch as root, or delete them by hand")
    if not found:
        yield Line("leftovers", "ok", "no process of an earlier start is running")


def _last_start(settings: Settings) -> float | None:
    try:
        record = load_run_record(workspace_of(settings))
    except HostError:
        return None  # the check "directories" reports it
    return record.last_start.wall if record is not None and record.last_start is not None else None


def ahead(settings: Settings, now: str, sets: Sets) -> Iterator[Line]:
    """Files ahead of the newest complete checkpoint: normal while training runs, else they make the next start hang."""
    from podwatch.checkpoints.layouts import make_layout
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


def remembered(settings: Settings, verbose: bool) -> Iterator[Line]:
    """A pause in effect, and with ``verbose`` the learned values of the run."""
    from podwatch.daemon.app import LEARNED
    from podwatch.daemon.pausing import KEY, described
    from podwatch.domain.pause import Pause

    path = settings.state_dir / settings.run_id / "journal.sqlite"
    if not path.exists():
        return
    journal = Journal.open(path, read_only=True)
    try:
        pause, learned = Pause.from_dict(journal.learned(KEY)), journal.learned(LEARNED)
    finally:
        journal.close()
    if pause is not None:
        text = f"{described(pause)}: podwatch does not stop or start training on its own"
        yield Line("pause", "warn", text, "to end the pause: `podwatch unpause`")
    for name, value in sorted(learned.items() if verbose and isinstance(learned, dict) else ()):
        if value not in (None, "", 0, [], {}, False):
            yield Line("learned", "ok", f"{name}: {value}")
