"""Check for training that runs, leftovers of an earlier start, and a pause."""

from collections.abc import Iterator

from podwatch.cli.check.report import Line
from podwatch.cli.offline import TrainingHere, recorded
from podwatch.config.settings import Settings
from podwatch.system import procfs
from podwatch.system.procfs import is_alive
from podwatch.trainer.supervisor_files import read_record

SHOWN = 4


def supervise(settings: Settings, present: TrainingHere) -> Iterator[Line]:
    mode, now, seen = settings.trainer.supervise, present.text, present.trees
    several = present.attachable
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


def leftovers(settings: Settings) -> Iterator[Line]:
    """Processes of an earlier start, which can make the next start hang or fail."""
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
        yield Line("leftovers", "fail", text, "end them with `kill PID`")
    else:
        yield Line("leftovers", "ok", "no process of an earlier start is running")


def paused(settings: Settings) -> Iterator[Line]:
    """A pause in effect."""
    from podwatch.app.pause import described

    run = recorded(settings)
    if run is not None and run.pause is not None:
        text = f"{described(run.pause)}: podwatch does not stop or start training on its own"
        yield Line("pause", "warn", text, "to end the pause: `podwatch unpause`")
