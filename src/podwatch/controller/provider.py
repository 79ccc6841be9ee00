"""Runs provider commands: one program with ``list``, ``create`` or ``destroy``, JSON on stdin and stdout
(docs/controller.md has the contract). What they print is parsed strictly: an answer of another shape is an error.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from podwatch.controller.machines import Listing, parse_created, parse_destroyed, parse_listing, plain
from podwatch.domain.errors import ExitCode, HostError, IntegrityError, PodwatchError
from podwatch.domain.secrets import scrub

NO_OFFER = 3
MOST_OUTPUT = 8 << 20
"""Bytes of stdout: a list of 10,000 machines is smaller."""
KEPT_ERRORS = 4000
"""Bytes of stderr that are kept, from its end."""


class ProviderError(PodwatchError):
    """A provider command failed, and did nothing. ``refused``: a repetition fails too. ``no_offer``: there is no
    machine within the price."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, *, where: str, refused: bool = False, no_offer: bool = False) -> None:
        super().__init__(what, where=where)
        self.refused, self.no_offer = refused, no_offer


class OutcomeUnknown(PodwatchError):  # noqa: N818
    """The command may have done what was asked: only a list can tell."""

    exit_code = ExitCode.TRY_AGAIN


@dataclass(frozen=True, slots=True)
class ProviderCommand:
    """One provider. ``argv`` and ``environ`` come from this machine, never from the store."""

    name: str
    argv: tuple[str, ...]
    timeout: float = 120.0
    environ: Mapping[str, str] = field(default_factory=dict)

    def list(self, run_id: str) -> Listing:
        """The machines of the account. Blocks up to ``timeout``. Raises ProviderError: never an empty list instead."""
        code, out, why = self._call("list", {"version": 1, "run_id": run_id})
        if code != 0:
            raise ProviderError(f"list failed ({why})", where=self.name, refused=code == ExitCode.DO_NOT_RUN)
        try:
            return parse_listing(out)
        except IntegrityError as error:
            raise ProviderError(f"list gave no usable answer ({error})", where=self.name) from error

    def create(
        self, run_id: str, generation: int, label: str, max_price: float, env: Mapping[str, str]
    ) -> tuple[str, float]:
        """Request one machine; returns (id, price per hour). Raises ProviderError if none was created, OutcomeUnknown
        if that is not certain."""
        request = {
            "version": 1,
            "run_id": run_id,
            "generation": generation,
            "label": label,
            "max_price_per_hour": max_price,
            "environment": dict(env),
        }
        try:
            code, out, why = self._call("create", request)
        except _NotStarted as error:
            raise ProviderError(str(error), where=self.name, refused=True) from error
        if code == 0:
            try:
                return parse_created(out, label)
            except IntegrityError as error:
                raise OutcomeUnknown(f"create gave no usable answer ({error})", where=self.name) from error
        if code in (ExitCode.DO_NOT_RUN, ExitCode.UNAVAILABLE, NO_OFFER):
            raise ProviderError(
                f"create failed ({why})",
                where=self.name,
                refused=code == ExitCode.DO_NOT_RUN,
                no_offer=code == NO_OFFER,
            )
        raise OutcomeUnknown(f"it is not known whether create worked ({why})", where=self.name)

    def destroy(self, machine: str, label: str) -> None:
        """Destroy the machine; one that is already gone counts as destroyed. Raises ProviderError or OutcomeUnknown:
        the next look tries again."""
        code, out, why = self._call("destroy", {"version": 1, "id": machine, "label": label})
        if code != 0:
            raise ProviderError(f"destroy failed ({why})", where=self.name, refused=code == ExitCode.DO_NOT_RUN)
        try:
            parse_destroyed(out, machine)
        except IntegrityError as error:
            raise OutcomeUnknown(f"destroy gave no usable answer ({error})", where=self.name) from error

    def _call(self, what: str, request: Mapping[str, Any]) -> tuple[int | None, bytes, str]:
        """(exit code, stdout, reason in words); the code is None if the command was killed at a limit. Raises
        _NotStarted."""
        try:
            process = subprocess.Popen(
                [*self.argv, what],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(self.environ),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise _NotStarted(
                f"cannot run {self.argv[0]}: {getattr(error, 'strerror', None) or error}",
                where=self.name,
                fix="install it or correct its path",
            ) from error
        try:
            limit, out, errors = _talk(process, plain(request).encode(), time.monotonic() + self.timeout)
        finally:
            _end_group(process)
        last = " ".join(scrub(errors.decode("utf-8", "replace")).split())[-500:]
        if limit:
            return None, b"", _why(limit, last)
        code = process.returncode
        return code, out, _why(f"exit code {code}" if code >= 0 else f"ended by signal {-code}", last)


class _NotStarted(HostError):  # noqa: N818
    """The program does not exist or cannot be executed."""


def _why(what: str, last: str) -> str:
    return f"{what}: {last}" if last else what


def _talk(process: "subprocess.Popen[bytes]", request: bytes, until: float) -> tuple[str, bytes, bytes]:
    """Pass the request, read both outputs until the program has ended; returns (limit that was hit, stdout, stderr)."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
    out, errors, rest = bytearray(), bytearray(), memoryview(request)
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdin, selectors.EVENT_WRITE)
        for pipe in (process.stdout, process.stderr):
            waiting.register(pipe, selectors.EVENT_READ)
        for pipe in (process.stdin, process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        while waiting.get_map():
            left = until - time.monotonic()
            if left <= 0:
                return f"no answer within {_seconds(process, until)}", bytes(out), bytes(errors)
            # Also without an event: the program can end while a grandchild holds its pipes open.
            events = waiting.select(min(left, 0.2))
            for key, _ in events:
                if key.fileobj is process.stdin:
                    rest = _write(process.stdin, rest)
                    if not rest:
                        waiting.unregister(process.stdin)
                        process.stdin.close()
                    continue
                data = _read(key.fd)
                if data == b"":
                    waiting.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    out += data or b""
                else:
                    errors = (errors + (data or b""))[-KEPT_ERRORS:]
            if len(out) > MOST_OUTPUT:
                return "its answer is too long", b"", bytes(errors)
            if not events and process.poll() is not None:
                break
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "it did not end in time", b"", bytes(errors)
    return "", bytes(out), bytes(errors)


def _seconds(process: "subprocess.Popen[bytes]", until: float) -> str:
    return "its time limit" if process.poll() is None else "its time limit, although it has ended"


def _write(pipe: IO[bytes], rest: memoryview) -> memoryview:
    try:
        return rest[os.write(pipe.fileno(), rest) :]
    except BlockingIOError:
        return rest
    except OSError:  # it does not read its request: its answer decides
        return rest[len(rest) :]


def _read(descriptor: int) -> bytes | None:
    try:
        return os.read(descriptor, 65_536)
    except BlockingIOError:
        return None


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of the command's own process group, and collect it."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:  # in an uninterruptible call of the kernel
        pass
