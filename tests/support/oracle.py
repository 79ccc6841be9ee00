"""Give one pod to this podwatch and to the second edition (``tools/edition-2``), and compare what they answer.

A pod is the directory of a configuration file: state, output, store and recordings lie below it. Each edition gets a
copy of it at the same path, so that paths in answers are equal; nothing of the product is imported.

    ours, oracle = both(["checkpoints", "--json"], pod / "podwatch.toml")
    assert unexplained("checkpoints", ours, oracle, EXPLAINED) == {}
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from tests.support import own_times

ROOT = Path(__file__).parents[2]

VOLATILE = frozenset({"time", "started_at", "pid", "http_url", "since", "for_seconds", "boot_id", "start_ticks"})
"""Fields of JSON documents that differ from one run of the same edition to the next."""
FREE_SPACE = frozenset({"used_bytes", "free_bytes", "used_ratio", "inodes_free"})
"""The same, for what other processes of the machine do to its disk."""


@dataclass(frozen=True, slots=True)
class Edition:
    """One podwatch: the command that starts it, and the paths of its own that its answers can name."""

    name: str
    command: tuple[str, ...]
    paths: tuple[str, ...]


OURS = Edition("ours", (sys.executable, "-P", "-m", "podwatch"), (sys.executable, sys.prefix, str(ROOT / "src")))


@cache
def second_edition() -> Edition:
    """The oracle; built first if it is missing (15 s)."""
    built = subprocess.run([str(ROOT / "tools" / "edition-2")], capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    program = Path(built.stdout.strip())
    venv = program.parent / "venv"
    return Edition("oracle", (str(program),), (f"{venv}/bin/python3", f"{venv}/bin/python", str(program.parent)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What one command printed. ``document``: its JSON without volatile values; None if it printed other text."""

    code: int
    out: str
    err: str
    document: Any


Ask = Callable[..., Answer]
"""Run one command of an edition on its pod: ``ask("checkpoints", "--json")``."""


# -- both editions ----------------------------------------------------------------------------------------------------


def both(arguments: Sequence[str], config: Path, *, environ: Mapping[str, str] | None = None) -> tuple[Answer, Answer]:
    """One command without a daemon; the answers of this podwatch and of the oracle."""
    ((ours, oracle),) = compare(config, lambda ask: [ask(*arguments)], environ=environ)
    return ours, oracle


def both_running(
    commands: Sequence[Sequence[str]],
    config: Path,
    *,
    ready: Callable[[Ask], bool],
    flags: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[tuple[Answer, Answer]]:
    """Several commands beside a daemon (``podwatch run FLAGS``), once it is ``ready``; the pairs of answers."""

    def beside_a_daemon(ask: Ask, start: Callable[[], subprocess.Popen[bytes]]) -> list[Answer]:
        daemon = start()
        try:
            _wait(lambda: ready(ask), daemon, config.parent / "daemon.log")
            return [ask(*command) for command in commands]
        finally:
            daemon.terminate()
            daemon.wait(180)

    return _compare(config, beside_a_daemon, flags, environ)


def compare(
    config: Path, question: Callable[[Ask], list[Answer]], *, environ: Mapping[str, str] | None = None
) -> list[tuple[Answer, Answer]]:
    """Any sequence of commands without a daemon; the pairs of answers."""
    return _compare(config, lambda ask, _: question(ask), (), environ)


def _compare(
    config: Path,
    question: Callable[[Ask, Callable[[], subprocess.Popen[bytes]]], list[Answer]],
    flags: Sequence[str],
    environ: Mapping[str, str] | None,
) -> list[tuple[Answer, Answer]]:
    answers = []
    for edition in (OURS, second_edition()):
        with _copy_of(config.parent):
            times: dict[str, str] = {}
            if edition is OURS:  # what was a setting in the second edition is a time that only tests can set
                rest, written = own_times.split(config.read_text())
                config.write_text(rest)
                times = own_times.write(written, config.with_name("test-times.toml"))
            else:
                config.write_text(config.read_text().replace('supervise = "start"', 'supervise = "keeper"'))
            run = _Run(edition, config, {**environment(config.parent), **times, **(environ or {})})
            answers.append(question(run.ask, lambda run=run: run.start(*flags)))  # type: ignore[misc]
    return list(zip(*answers, strict=True))


def environment(pod: Path) -> dict[str, str]:
    """Nothing of the caller's environment but PATH: all files of both editions lie below the pod."""
    return {
        "PATH": os.environ["PATH"], "HOME": str(pod), "TZ": "UTC", "LC_ALL": "C.UTF-8", "NO_COLOR": "1",
        "PODWATCH_RUNTIME_DIR": str(pod / "run"),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    edition: Edition
    config: Path
    environ: dict[str, str]

    def ask(self, *arguments: str) -> Answer:
        done = subprocess.run(
            [*self.edition.command, "-c", str(self.config), *arguments],
            cwd=self.config.parent, env=self.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        return answer_of(self.edition, done.returncode, done.stdout, done.stderr)

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        with (self.config.parent / "daemon.log").open("ab") as log:
            return subprocess.Popen(
                [*self.edition.command, "-c", str(self.config), "run", *flags],
                cwd=self.config.parent, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip


@contextlib.contextmanager
def _copy_of(pod: Path) -> Iterator[None]:
    """A copy in the pod's place (times and symlinks kept, owners and hard links not); the pod itself is put back."""
    original = pod.with_name(f"{pod.name}.original")
    pod.rename(original)
    try:
        shutil.copytree(original, pod, symlinks=True)
        yield
    finally:
        end_processes(pod)
        shutil.rmtree(pod, ignore_errors=True)
        original.rename(pod)


def end_processes(pod: Path) -> None:
    """SIGKILL for what runs in this pod: processes whose environment names its runtime directory or home."""
    mark = str(pod).encode() + b"\0"
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and b"HOME=" + mark in (entry / "environ").read_bytes() + b"\0":
                os.kill(int(entry.name), signal.SIGKILL)


def _wait(ready: Callable[[], bool], daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while not ready():
        if daemon.poll() is not None or time.monotonic() > end:
            raise AssertionError(f"the daemon is not ready (exit {daemon.returncode}):\n{log.read_text()[-4000:]}")
        time.sleep(0.2)


# -- answers and their differences ------------------------------------------------------------------------------------


def answer_of(edition: Edition, code: int, out: str, err: str) -> Answer:
    """The answer without what names the edition itself or differs from run to run."""
    for path in edition.paths:
        out, err = (text.replace(path, "<podwatch>") for text in (out, err))
    try:
        return Answer(code, out, err, without_volatile(json.loads(out)))
    except ValueError:
        return Answer(code, out, err, None)


def without_volatile(value: Any) -> Any:
    if isinstance(value, list):
        return [without_volatile(one) for one in value]
    if not isinstance(value, dict):
        return value
    volatile = VOLATILE | FREE_SPACE
    return {k: "<volatile>" if k in volatile and v is not None else without_volatile(v) for k, v in value.items()}


def differences(ours: Answer, oracle: Answer) -> dict[str, tuple[Any, Any]]:
    """Each place where the answers differ, with both values: ``code``, ``err``, ``out`` or ``document.KEY[0].KEY``."""
    found = {"code": (ours.code, oracle.code), "err": (ours.err, oracle.err)}
    if ours.document is None or oracle.document is None:
        found["out"] = (ours.out, oracle.out)
    else:
        left, right = _leaves(ours.document, "document"), _leaves(oracle.document, "document")
        found |= {place: (left.get(place, "<missing>"), right.get(place, "<missing>")) for place in {**left, **right}}
    return {place: values for place, values in found.items() if values[0] != values[1]}


def _leaves(value: Any, place: str) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        return {k: v for key, one in value.items() for k, v in _leaves(one, f"{place}.{key}").items()}
    if isinstance(value, list) and value:
        return {k: v for n, one in enumerate(value) for k, v in _leaves(one, f"{place}[{n}]").items()}
    return {place: value}


def unexplained(
    case: str, ours: Answer, oracle: Answer, explained: Mapping[tuple[str, str], str]
) -> dict[str, tuple[Any, Any]]:
    """The differences that the table has no reason for. Its keys are patterns (``*``) of a case and a place; indexes of
    lists are left out of the place: ``("checkpoints *", "document.sets.reason")``."""

    def is_explained(place: str) -> bool:
        plain = re.sub(r"\[\d+\]", "", place)
        return any(fnmatchcase(case, one) and fnmatchcase(plain, where) for one, where in explained)

    return {place: values for place, values in differences(ours, oracle).items() if not is_explained(place)}
