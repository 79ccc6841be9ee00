"""Check for leftovers of an earlier start, files that a start would quarantine, podwatch's stored state, and other
programs that copy or delete this run's files.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints.trainers import process_names
from podwatch.cli.check.report import Line, Sets, in_time
from podwatch.cli.offline import recorded
from podwatch.config.settings import Settings
from podwatch.config.store_kinds import bucket_of
from podwatch.domain.errors import HostError
from podwatch.domain.finding import counted
from podwatch.journal.journal import Journal
from podwatch.recovery import stale_files
from podwatch.system import procfs
from podwatch.system.procfs import is_alive
from podwatch.trainer.find import find_trees, read_pod, sought_run
from podwatch.trainer.process_roles import SHELLS, Roles, program
from podwatch.trainer.rules import TRAINING, FoundTree, SoughtRun, TreeAnswer
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


def remembered(settings: Settings, verbose: bool) -> Iterator[Line]:
    """A pause in effect, and with ``verbose`` the learned values of the run."""
    from podwatch.daemon.components import LEARNED
    from podwatch.daemon.pause import described

    run = recorded(settings)
    if run is not None and run.pause is not None:
        text = f"{described(run.pause)}: podwatch does not stop or start training on its own"
        yield Line("pause", "warn", text, "to end the pause: `podwatch unpause`")
    path = settings.state_dir / settings.run_id / "journal.sqlite"
    if not path.exists():
        return
    journal = Journal.open(path, read_only=True)
    try:
        learned = journal.learned(LEARNED)
    finally:
        journal.close()
    for name, value in sorted(learned.items() if verbose and isinstance(learned, dict) else ()):
        if value not in (None, "", 0, [], {}, False):
            yield Line("learned", "ok", f"{name}: {value}")


# -- other sync and clean-up programs --------------------------------------------------------------------------------
# They can upload incomplete checkpoints, or delete those that podwatch keeps.

COPIERS = frozenset(
    {"aws", "azcopy", "b2", "b2v3", "b2v4", "gcloud", "gsutil", "hf", "huggingface-cli", "lsyncd", "rclone"}
    | {"restic", "rsync", "s3cmd", "s4cmd", "s5cmd"}
)
"""Programs whose purpose is to copy files away."""
_SCRIPT = re.compile(
    r"(?:^|[^a-z])(?:sync(?:er)?|upload(?:er)?|back_?up|clean(?:er|_?up)?|prune|purge|rotate)(?:$|[^a-z])",
    re.IGNORECASE,
)
"""Names of such scripts: ``sync_to_s3.py``, ``cleanup-checkpoints.sh``; but not ``async_rl.py`` or ``cleanrl``."""
_SUBCOMMAND = re.compile(r"-.*|[a-z]+")
"""An option, or a plain word such as the ``sync`` of ``podwatch sync``."""
_WORDS = re.compile(r"[\s;&|()'\"]+")
_READ_BYTES = 64 << 10
_CRON = ("/etc/crontab", "/etc/cron.d/*", "/var/spool/cron/crontabs/*", "/var/spool/cron/*")
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Ours:
    """The names in a command line that make it concern this run."""

    output_dirs: tuple[str, ...]
    """The configured path, and the path with links resolved."""
    bucket: str = ""


def other_tools(settings: Settings) -> Iterator[Line]:
    output = settings.trainer.output_dir
    store = settings.sync.store or ""
    ours = Ours(tuple(sorted({str(output), os.path.realpath(output)})), bucket_of(store))
    found = in_time(lambda: [*_running(ours, sought_run(settings)), *_scheduled(ours)])
    if not found:
        yield Line("other tools", "ok", "no other tool found that uploads or deletes this run's files")
        return
    listed = "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    fix = (
        "stop it: it can upload incomplete checkpoints, or delete those podwatch keeps (replacements: docs/runs.md)"
        if store
        else "podwatch has no store and makes no copies: keep the tool if it is your backup, stop it if it deletes"
    )
    yield Line("other tools", "warn", f"another tool seems to work on this run's files: {listed}", fix)


def _running(ours: Ours, run: SoughtRun) -> Iterator[str]:
    for process in read_pod(run, Roles(process_names())):
        if process.podwatch or process.start_id or process.cuda or process.role in TRAINING:
            continue
        if name := meddles(process.argv, process.cwd or "/", ours, _text):
            yield f"{name} (pid {process.identity.pid})"


def _scheduled(ours: Ours) -> Iterator[str]:
    for pattern in _CRON:
        for path in sorted(Path("/").glob(pattern[1:])):
            for line in _text(str(path)).splitlines():
                command = line.strip()
                if not command.startswith("#") and (name := meddles(("sh", "-c", command), "/", ours, _text)):
                    yield f"{name} (in {path})"


def meddles(argv: Sequence[str], cwd: str, ours: Ours, text_of: Callable[[str], str]) -> str:
    """The name of a copying or cleaning program that uses this run's directory or bucket, on its command line or in its
    script; else empty. Only the name, because arguments can contain keys. ``text_of`` reads a script (empty on
    failure)."""
    name, arguments = program(argv)
    if name in SHELLS:
        inline = any(word.startswith("-") and "c" in word for word in arguments[:1])
        script = [word for word in arguments if not word.startswith("-")]
        programs = _WORDS.split(" ".join(script)) if inline else script[:1]
    else:
        programs = [next((word for word in argv if word.rpartition("/")[2] == name), name)]
    words = _WORDS.split(" ".join(arguments))
    named = any(_names(word, cwd, ours) for word in words)
    for word in programs:
        base = word.rpartition("/")[2]
        if base in COPIERS:
            if named:
                return base
        elif _SCRIPT.search(base) and not _SUBCOMMAND.fullmatch(base):
            text = "" if named else text_of(os.path.join(cwd, word))  # noqa: PTH118
            if named or any(mark in text for mark in _marks(ours)):
                return base
    return ""


def _marks(ours: Ours) -> tuple[str, ...]:
    return (*ours.output_dirs, ours.bucket) if ours.bucket else ours.output_dirs


def _names(word: str, cwd: str, ours: Ours) -> bool:
    """Whether the word contains one of our names, or is a path equal to, in or above output_dir."""
    if any(mark in word for mark in _marks(ours)):
        return True
    if not word or word.startswith("-") or ":" in word:
        return False
    path = os.path.normpath(os.path.join(cwd, word))  # noqa: PTH118
    return path != "/" and any(o == path or o.startswith(path + "/") for o in ours.output_dirs)


def _text(path: str) -> str:
    try:
        if not Path(path).is_file():  # a pipe would block
            return ""
        with Path(path).open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""
