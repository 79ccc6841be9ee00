"""podwatch's own W&B run: starts the child process wandb_child.py and sends it metrics and alerts."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podwatch.config.trusted_files import check_trusted
from podwatch.domain.errors import PodwatchError
from podwatch.domain.finding import Finding, FindingKind, Severity
from podwatch.domain.secrets import register
from podwatch.report.deliver_notices import NotSent, one_line
from podwatch.system.child import account_of, working_as
from podwatch.system.clock import Clock
from podwatch.system.environment_without_secrets import scrubbed_environment
from podwatch.trainer.environment import build_environment

CHILD = Path(__file__).with_name("wandb_child.py")
INIT_SECONDS = 130.0
"""wandb's own timeout, set by wandb_child.py, is 100 s."""
ANSWER_SECONDS = 30.0
END_SECONDS = 3.0
FIRST_PAUSE, LONGEST_PAUSE = 300.0, 3600.0
"""Seconds of backoff after W&B failed."""
_PASSED = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_INSECURE_DISABLE_SSL", "WANDB_IDENTITY_TOKEN_FILE")
"""The W&B variables taken from training: access only. Its ids, names and directories are not used."""
_LEVELS = {str(Severity.CRITICAL): "ERROR", str(Severity.WARNING): "WARN"}


@dataclass(frozen=True, slots=True)
class WandbPlan:
    """``python`` has wandb installed; ``directory`` is podwatch's own. ``training`` is the training's environment.
    ``user``: the child runs as this user; empty: as podwatch's own."""

    python: str
    directory: Path
    run_id: str
    project: str
    entity: str = ""
    idle: float = 900.0
    user: str = ""
    training: Mapping[str, str] = field(default_factory=dict, repr=False)

    def check_python(self) -> None:
        """Raise ConfigurationError if another user could replace what would run with podwatch's own rights: ``python``
        or what it imports. Blocks. Raises HostError if there is no such user."""
        if account_of(self.user) or self.python == sys.executable:
            return
        python = Path(self.python)
        with contextlib.suppress(OSError):  # it is not there: whoever runs it says so
            check_trusted(python, "wandb.python")
            for packages in python.parents[1].glob("lib/python*/site-packages"):
                for directory in (packages, *packages.glob("wandb")):
                    check_trusted(directory, "what wandb.python imports")

    @property
    def place(self) -> str:
        """Where an offline run is written."""
        return f"~{self.user}/.cache/podwatch-wandb" if account_of(self.user) else str(self.directory)

    def first_order(self) -> dict[str, Any]:
        run = {
            "id": f"podwatch-{self.run_id}"[:64],
            "name": f"podwatch {self.run_id}",
            "group": self.run_id,
            "job_type": "podwatch",
            "project": self.project,
            "resume": "allow",
            "dir": "" if account_of(self.user) else str(self.directory),
        }
        return {"init": {**run, **({"entity": self.entity} if self.entity else {})}, "idle": self.idle}

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment of the child, with the W&B credentials; they are never in an argument."""
        base = build_environment(scrubbed_environment(environ, keep_python=False), {}, None, user=self.user)
        ours = {n: v for n, v in base.items() if not n.startswith("WANDB_")}
        passed = {n: v for source in (environ, self.training) for n, v in source.items() if n in _PASSED}
        return {**ours, **passed}


class WandbRun:
    """A notification channel (alerts) and the sink of metrics. The first of either starts the child."""

    name = "wandb"

    def __init__(self, plan: WandbPlan, clock: Clock) -> None:
        self._plan, self._clock = plan, clock
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._tail = bytearray()
        self._drain: asyncio.Task[None] | None = None
        self._pause, self._not_before = FIRST_PAUSE, 0.0
        self.why = ""
        self.where = ""
        """The URL of the run, or ``offline``."""
        register(plan.environment(os.environ).get("WANDB_API_KEY", ""))

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def send(self, document: Mapping[str, Any]) -> None:
        """Send one notice as a W&B alert. Raises NotSent."""
        level = _LEVELS.get(str(document["severity"]), "INFO")
        await self._order({"alert": {"title": document["title"][:250], "text": document["text"], "level": level}})

    async def push(self, metrics: Mapping[str, float]) -> None:
        """Log one row; an error is kept for ``findings``."""
        if self._turn.locked():
            return  # init is in progress: drop this row
        with contextlib.suppress(NotSent):
            await self._order({"log": dict(metrics)})

    def findings(self, at: float) -> tuple[Finding, ...]:
        if not self.why:
            return ()
        summary = f"podwatch cannot write its own W&B run: {self.why}"
        fix = "`podwatch check` tests [wandb]; the W&B run of training is not affected"
        return (Finding(FindingKind.NOTIFY_FAILING, Severity.WARNING, summary, at, fix, subject="wandb run"),)

    async def close(self, seconds: float = END_SECONDS) -> None:
        """Close the child's input, wait up to ``seconds``, then kill its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
        await self._end(process)

    async def _order(self, order: Mapping[str, Any]) -> None:
        async with self._turn:
            try:
                if await self._ask_a_running_child(order) is None and await self._ask_a_running_child(order) is None:
                    raise NotSent("its process ended")
            except NotSent as error:
                self.why = str(error)
                raise
            self.why = ""

    async def _ask_a_running_child(self, order: Mapping[str, Any]) -> str | None:
        if self._process is None or self._process.returncode is not None:
            await self._begin()
        return await self._ask(order, ANSWER_SECONDS)

    async def _begin(self) -> None:
        now = self._clock.monotonic()
        if now < self._not_before:
            raise NotSent(self.why or "its process ended; podwatch retries later")
        await self._discard()
        self._plan.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._plan.check_python()
            with working_as(self._plan.user) as account:
                process = self._process = await asyncio.create_subprocess_exec(
                    self._plan.python, "-I", str(CHILD),
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                    env=self._plan.environment(os.environ), cwd="/", start_new_session=True, **account,
                )  # fmt: skip
            assert process.stderr is not None
            self._tail.clear()
            self._drain = asyncio.create_task(_drain(process.stderr, self._tail), name="wandb stderr")
            answer = await self._ask(self._plan.first_order(), INIT_SECONDS)
            if answer is None:
                raise NotSent("its process ended")
        except (NotSent, OSError, PodwatchError) as error:
            self.why = one_line(str(error))
            self._not_before, self._pause = now + self._pause, min(LONGEST_PAUSE, self._pause * 2)
            await self._discard()
            raise NotSent(self.why) from error
        self.where, self._pause = one_line(answer), FIRST_PAUSE

    async def _ask(self, order: Mapping[str, Any], seconds: float) -> str | None:
        """The answer; None: the child had ended by itself when the request came. Raises NotSent."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                with contextlib.suppress(ConnectionError):  # it has ended: its last output has the reason
                    process.stdin.write(json.dumps(order).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            await self._discard()  # a late answer would count as that of the next request
            raise NotSent(f"no answer within {seconds:g} s") from None
        except (OSError, ValueError) as error:
            await self._discard()
            raise NotSent(str(error)) from error
        try:
            answer = json.loads(line)
            ok, why = bool(answer["ok"]), str(answer["why"])
        except (ValueError, KeyError, TypeError, RecursionError):
            if not line:
                with contextlib.suppress(TimeoutError):  # a signal before its own end would replace its exit code
                    await asyncio.wait_for(process.wait(), 1.0)
            if self._drain is not None:
                await asyncio.wait([self._drain], timeout=1.0)
            await self._discard()
            if not line and process.returncode == 0:
                return None
            said = self._tail.decode(errors="replace").strip().splitlines()[-1:]
            raise NotSent(one_line(f"its process ended{': ' + said[0] if said else ''}")) from None
        if not ok:
            raise NotSent(one_line(why))
        return why

    async def _discard(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await self._end(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # wandb's helper process is in the same session
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 5.0)
        if self._drain is not None:
            self._drain.cancel()
        process._transport.close()  # type: ignore[attr-defined]  # wandb's helper can still hold the pipe


async def _drain(stream: asyncio.StreamReader, tail: bytearray) -> None:
    while data := await stream.read(4096):
        tail += data
        del tail[:-4096]
