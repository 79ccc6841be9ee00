"""Runs provider commands: one program with ``list``, ``create`` or ``destroy``, JSON on stdin and stdout
(docs/controller.md has the contract). What they print is parsed strictly: an answer of another shape is an error.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from podwatch.controller.machines import Listing, parse_created, parse_destroyed, parse_listing
from podwatch.domain.errors import ExitCode, HostError, IntegrityError, PodwatchError
from podwatch.domain.secrets import scrub

NO_OFFER = 3
"""Exit code of ``create``: there is no machine within the price."""
MOST_OUTPUT = 8 << 20
"""Bytes of stdout and stderr: a list of 10,000 machines is smaller."""
POLL_SECONDS = 0.02
KEPT_ERRORS = 4000
"""Bytes of stderr that are kept, from its end."""


class ProviderError(PodwatchError):
    """A provider command failed, and did nothing. ``refused``: a repetition fails too."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, *, refused: bool = False) -> None:
        super().__init__(what, where="the provider's command")
        self.refused = refused


class OutcomeUnknown(PodwatchError):  # noqa: N818
    """The command may have done what was asked: only a list can tell."""

    exit_code = ExitCode.TRY_AGAIN


@dataclass(frozen=True, slots=True)
class ProviderCommand:
    """Of the provider. ``argv`` and ``environ`` come from this machine, never from the store."""

    argv: tuple[str, ...]
    timeout: float = 120.0
    environ: Mapping[str, str] = field(default_factory=dict)

    def list(self, run_id: str) -> Listing:
        """The machines of the account. Blocks up to ``timeout``. Raises ProviderError: never an empty list instead."""
        code, out, why = self._call("list", {"version": 1, "run_id": run_id})
        if code != 0:
            raise ProviderError(f"list failed ({why})", refused=code == ExitCode.DO_NOT_RUN)
        try:
            return parse_listing(out)
        except IntegrityError as error:
            raise ProviderError(f"list gave no usable answer ({error})") from error

    def create(
        self, run_id: str, generation: int, label: str, max_price: float, env: Mapping[str, str]
    ) -> tuple[str, float]:
        """Request one machine; returns (id, price per hour). Raises ProviderError if none was created, OutcomeUnknown
        if that is not certain."""
        wanted = {"generation": generation, "label": label, "max_price_per_hour": max_price}
        request = {"version": 1, "run_id": run_id, **wanted, "environment": dict(env)}
        try:
            code, out, why = self._call("create", request)
        except _NotStarted as error:
            raise ProviderError(str(error), refused=True) from error
        if code == 0:
            try:
                return parse_created(out, label)
            except IntegrityError as error:
                raise OutcomeUnknown(f"create gave no usable answer ({error})") from error
        if code in (ExitCode.DO_NOT_RUN, ExitCode.UNAVAILABLE, NO_OFFER):
            raise ProviderError(f"create failed ({why})", refused=code == ExitCode.DO_NOT_RUN)
        raise OutcomeUnknown(f"it is not known whether create worked ({why})")

    def destroy(self, machine: str, label: str) -> None:
        """Destroy the machine; one that is already gone counts as destroyed. Raises ProviderError or OutcomeUnknown:
        the next look tries again."""
        code, out, why = self._call("destroy", {"version": 1, "id": machine, "label": label})
        if code != 0:
            raise ProviderError(f"destroy failed ({why})", refused=code == ExitCode.DO_NOT_RUN)
        try:
            parse_destroyed(out, machine)
        except IntegrityError as error:
            raise OutcomeUnknown(f"destroy gave no usable answer ({error})") from error

    def _call(self, what: str, request: Mapping[str, Any]) -> tuple[int | None, bytes, str]:
        """(exit code, stdout, reason in words); the code is None if the command was killed at a limit. Raises
        _NotStarted."""
        with ExitStack() as stack:
            stdin, stdout, stderr = (_memory(stack, name) for name in ("stdin", "stdout", "stderr"))
            os.pwrite(stdin, json.dumps(request).encode(), 0)
            try:
                argv, env = [*self.argv, what], dict(self.environ)
                process = subprocess.Popen(
                    argv, stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
                )
            except (OSError, ValueError) as error:
                why = f"cannot run {self.argv[0]}: {getattr(error, 'strerror', None) or error}"
                raise _NotStarted(why, fix="install it or correct its path") from error
            try:
                limit = _limit_hit(process, (stdout, stderr), time.monotonic() + self.timeout)
            finally:
                _end_group(process)
            size = os.fstat(stderr).st_size
            errors = os.pread(stderr, KEPT_ERRORS, max(0, size - KEPT_ERRORS)).decode("utf-8", "replace")
            last = " ".join(scrub(errors).split())[-500:]
            if limit:
                return None, b"", _why(limit, last)
            code = process.returncode
            how = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
            return code, os.pread(stdout, MOST_OUTPUT, 0), _why(how, last)


class _NotStarted(HostError):  # noqa: N818
    """The program does not exist or cannot be executed."""


def _why(what: str, last: str) -> str:
    return f"{what}: {last}" if last else what


def _memory(stack: ExitStack, name: str) -> int:
    """A file in memory, until the stack closes: a grandchild that keeps it open delays nothing, and no disk is full."""
    found = os.memfd_create(name)
    stack.callback(os.close, found)
    return found


def _limit_hit(process: "subprocess.Popen[bytes]", outputs: tuple[int, ...], until: float) -> str:
    """Wait until the program has ended; which limit it hit, if it did."""
    while process.poll() is None:
        if time.monotonic() >= until:
            return "no answer within its time limit"
        if sum(os.fstat(one).st_size for one in outputs) > MOST_OUTPUT:
            break
        time.sleep(POLL_SECONDS)
    return "its answer is too long" if sum(os.fstat(one).st_size for one in outputs) > MOST_OUTPUT else ""


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of the command's own process group, and collect it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # in an uninterruptible call of the kernel
        process.wait(5.0)
