"""One small tree of errors, each with the exit code it ends a command with.

An error that reaches a person says three things: what is wrong, where, and what to do. ``PodwatchError`` makes the
three explicit so that no raise site can forget one.
"""

from enum import IntEnum

from podwatch.domain.secrets import scrub


class ExitCode(IntEnum):
    """Process exit codes (DESIGN section 7). ``status`` uses 0-3; every other command the rest."""

    OK = 0
    FAILED = 1
    STATUS_WARNING = 1
    STATUS_CRITICAL = 2
    STATUS_UNKNOWN = 3
    USAGE = 64
    UNAVAILABLE = 69
    TRY_AGAIN = 75
    PERMISSION = 77
    CONFIGURATION = 78
    GAVE_UP = 86


class PodwatchError(Exception):
    """Base of everything podwatch raises on purpose.

    ``what`` is one clear line without a full stop; ``where`` names the file, key, URL or device; ``fix`` tells the
    person what to do. ``str()`` joins them as ``what (where): fix``. They hold no secret: they are
    scrubbed here.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = scrub(what)
        self.where = scrub(where)
        self.fix = scrub(fix)
        super().__init__(self.what)

    def __str__(self) -> str:
        text = f"{self.what} ({self.where})" if self.where else self.what
        return f"{text}: {self.fix}" if self.fix else text


class ConfigurationError(PodwatchError):
    """The configuration cannot be used: unknown key, bad unit, contradiction, missing value."""

    exit_code = ExitCode.CONFIGURATION


class UsageError(PodwatchError):
    """The command line asks for something that does not exist."""

    exit_code = ExitCode.USAGE


class HostError(PodwatchError):
    """This machine cannot do what was asked: no GPU library, no such directory, a full disk."""

    exit_code = ExitCode.UNAVAILABLE


class PermissionDenied(HostError):  # noqa: N818 - reads better at the raise site than PermissionDeniedError
    """The operating system said no."""

    exit_code = ExitCode.PERMISSION


class Busy(HostError):  # noqa: N818
    """Someone else holds what is needed; trying again later can succeed."""

    exit_code = ExitCode.TRY_AGAIN


class GaveUp(PodwatchError):  # noqa: N818
    """This machine needs a person, or the job needs another machine."""

    exit_code = ExitCode.GAVE_UP


class RemoteError(PodwatchError):
    """The object store or another remote service failed. ``transient`` says whether waiting can help."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, *, where: str = "", fix: str = "", transient: bool = True) -> None:
        super().__init__(what, where=where, fix=fix)
        self.transient = transient


class IntegrityError(RemoteError):
    """Bytes do not match their recorded size or hash. Never transient for the object concerned."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix, transient=False)


def is_refusal(error: BaseException) -> bool:
    """Whether trying again cannot help until somebody changes something: a refused key, a cap, a missing bucket, a
    wrong configuration. Damaged bytes concern one object and are no refusal."""
    if isinstance(error, IntegrityError):
        return False
    return isinstance(error, (ConfigurationError, PermissionDenied)) or not getattr(error, "transient", True)


class InternalError(PodwatchError):
    """A promise of our own code is broken; the text asks for a report."""
