"""Check for other sync or clean-up scripts: they can upload incomplete checkpoints, or delete those podwatch keeps."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.cli.doctoring.common import Line, in_time
from podwatch.config.settings import Settings
from podwatch.trainer import find
from podwatch.trainer.roles import SHELLS, program

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
    bucket = store.removeprefix("b2://").partition("/")[0] if store.startswith("b2://") else ""
    ours = Ours(tuple(sorted({str(output), os.path.realpath(output)})), bucket)
    found = in_time(lambda: [*_running(ours, find.run_of(settings)), *_scheduled(ours)])
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


def _running(ours: Ours, run: find.Run) -> Iterator[str]:
    for process in find.gather(run, own_pid=os.getpid()):
        if process.ours or process.cuda or process.launcher_like:
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
