"""podwatch's side of one run: starts ``hooks/child_main.py``, gives it its order, returns its result."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from podwatch.config.env_files import read_env_file
from podwatch.config.settings import HookSettings, Settings
from podwatch.config.trusted_files import check_command
from podwatch.domain.errors import PodwatchError
from podwatch.domain.secrets import scrub
from podwatch.system.child import account_of
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.trainer.environment import as_given, build_environment

GRACE_SECONDS: Final = 5.0
"""Between SIGTERM and SIGKILL at the time limit."""
OVERHEAD_SECONDS: Final = 60.0
"""For the worker's own start, lock and end, beyond the command's time limit: a busy machine."""
END_SECONDS: Final = 3.0
"""For the end of a run that podwatch interrupts."""
KILL_SECONDS: Final = 1.0
"""For the end of a worker that needed longer, and of what it left."""
RESULT_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """One run. ``env`` can hold secrets: it is passed by a pipe. ``lock`` and ``log`` are paths, empty for none."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    timeout: float
    document: str
    title: str
    log: str = ""
    lock: str = ""
    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] = ()
    grace: float = GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Result:
    """``code`` is None if the command did not start or was ended. ``tail``: the end of its output, as it is."""

    code: int | None
    seconds: float = 0.0
    timed_out: bool = False
    problem: str = ""
    tail: str = field(default="", repr=False)
    dropped: int = 0

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out and not self.problem

    @property
    def last_line(self) -> str:
        """The last line of its output, without secrets."""
        lines = [line.strip() for line in self.tail.splitlines() if line.strip()]
        return scrub("".join(c if c.isprintable() else " " for c in lines[-1])[:300]) if lines else ""

    def why(self, timeout: float) -> str:
        """Why it failed, in words, with the last line of its output; empty if it did not."""
        if self.ok:
            return ""
        how = f"no end within {timeout:g} s" if self.timed_out else self.problem or _how(self.code)
        return f"{how}: {self.last_line}" if self.last_line else how


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(-code).name}"
    return f"exit code {code}"


def order_for(
    child: HookSettings,
    settings: Settings,
    environ: Mapping[str, str],
    *,
    own: Mapping[str, str],
    document: Mapping[str, Any],
    title: str,
    state: Path | None,
) -> Order:
    """The order for a command of the configuration. Its environment: that of training, unless it runs with podwatch's
    rights beside training of another user; its own env_file; ``own``: its PODWATCH_* variables and the GPUs of an
    evaluation. ``state``: the directory of log and lock. Blocks: reads the env_files. Raises PodwatchError."""
    trainer = settings.trainer
    user = settings.user_of(child)
    account = account_of(user)
    training = {**trainer.env, **(read_env_file(trainer.env_file) if trainer.env_file is not None else {})}
    directory = child.cwd or trainer.cwd or trainer.output_dir.parent
    base = as_given(environ)
    if settings.outranks_training(child):  # PATH and PYTHONPATH of training name its user's directories
        base, training, directory = environ, {}, child.cwd or Path("/")
    environment = {**build_environment(base, training, child.env_file, user=user), **own}
    if settings.outranks_training(child):
        check_command(child.command, directory, environment.get("PATH"))
    return Order(
        tuple(child.command),
        str(directory),
        environment,
        child.timeout,
        json.dumps(document, default=str) + "\n",
        title,
        str(state / f"{child.name}.log") if state is not None else "",
        str(state / f"{child.name}.lock") if state is not None else "",
        account.get("user"),
        account.get("group"),
        tuple(account.get("extra_groups", ())),
    )


async def run(order: Order) -> Result:
    """Run it to its end. Cancelling ends the command and all that it started, within ``END_SECONDS``; what a killed
    worker left is ended, too. Never raises a PodwatchError: what went wrong is in the result."""
    try:
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "podwatch.hooks.child_main",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            env=scrubbed_environment(os.environ), cwd="/", start_new_session=True, limit=RESULT_BYTES,
        )  # fmt: skip
    except OSError as error:
        return Result(None, problem=f"cannot start a process: {error.strerror}")
    assert worker.stdin is not None
    assert worker.stdout is not None
    line = b""
    try:
        with contextlib.suppress(TimeoutError, ConnectionError, ValueError):
            async with asyncio.timeout(order.timeout + order.grace + OVERHEAD_SECONDS):
                worker.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
                await worker.stdin.drain()
                line = await worker.stdout.readline()
    finally:
        worker.stdin.close()  # the worker ends everything now
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(worker.wait(), END_SECONDS)
        for end in (worker.terminate, worker.kill):  # the first one ends the worker, and what that leaves
            if worker.returncode is None:
                with contextlib.suppress(ProcessLookupError, TimeoutError):
                    end()
                    await asyncio.wait_for(worker.wait(), KILL_SECONDS)
        worker._transport.close()  # type: ignore[attr-defined]  # a process that cannot be ended still holds the pipe
    return _result(line)


def _result(line: bytes) -> Result:
    try:
        result = Result(**json.loads(line))
        return replace(result, problem=scrub(result.problem))
    except (ValueError, TypeError):
        return Result(None, problem="its worker process ended without a result")


def problem_of(child: HookSettings, settings: Settings, environ: Mapping[str, str]) -> tuple[str, str]:
    """Why the command cannot run as things are now, and the fix; both empty if it can. Blocks."""
    try:
        order = order_for(child, settings, environ, own={}, document={}, title="", state=None)
    except PodwatchError as error:
        return f"{error.what}{f' ({error.where})' if error.where else ''}", error.fix
    cwd, program = Path(order.cwd), order.argv[0]
    if not cwd.is_dir():
        return f"its working directory {cwd} does not exist", "create it, or set cwd"
    found = shutil.which(str(cwd / program) if "/" in program else program, path=order.env.get("PATH"))
    if found is None:
        return f"{program} not found or not executable", "write its absolute path, and make it executable"
    script = Path(order.argv[1]) if len(order.argv) > 1 else Path()
    needed = {Path(found): "-x"}
    if script.suffix in (".py", ".sh"):
        needed[cwd / script] = "-r"
        if not (cwd / script).is_file():
            return f"{script}, which {program} gets, not found in {cwd}", "correct the path"
    for path, right in needed.items():
        if _lacks(order, right, path):
            what = f"user {settings.user_of(child)} cannot {'execute' if right == '-x' else 'read'} {path}"
            fix = "move it where this user may read it, such as /opt, or change its mode and those of its directories"
            return f"{what}: permission denied", fix
    return "", ""


def _lacks(order: Order, right: str, path: Path) -> bool:
    """Whether the order's user lacks this right (as of test(1)), as the kernel says. What cannot be asked is no
    finding."""
    if order.uid is None or order.uid == 0:
        return False
    ask = ["/bin/sh", "-c", 'test "$0" "$1"', right, str(path)]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(
            ask, user=order.uid, group=order.gid, extra_groups=order.groups, cwd="/", env={}, timeout=10, check=False
        )
        return done.returncode == 1
    return False
