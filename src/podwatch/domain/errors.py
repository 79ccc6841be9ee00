"""podwatch's exceptions, each with the exit code that it ends a command with.

An error message has three parts: what is wrong, where, and the fix. ``PodwatchError`` has a parameter for each.
"""

from enum import IntEnum

from podwatch.domain.secrets import scrub


class ExitCode(IntEnum):
    """Process exit codes. ``status`` uses 0 to 3; every other command uses the rest."""

    OK = 0
    FAILED = 1
    STATUS_WARNING = 1
    STATUS_CRITICAL = 2
    STATUS_UNKNOWN = 3
    USAGE = 64
    DO_NOT_RUN = 65
    """The training command or its configuration is at fault, or an operator stopped the run."""
    UNAVAILABLE = 69
    TRY_AGAIN = 75
    PERMISSION = 77
    CONFIGURATION = 78
    GAVE_UP = 86
    """Run again, preferably on another machine."""


class PodwatchError(Exception):
    """Base class of podwatch's exceptions.

    ``what``: one line without a full stop. ``where``: the file, key, URL or device. ``fix``: the operator's remedy, as
    an imperative. ``str()`` joins them as ``what (where): fix``. Secrets are removed from all three.
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
    """The operating system denied the permission."""

    exit_code = ExitCode.PERMISSION


class Busy(HostError):  # noqa: N818
    """Another process or pod holds the resource; a later attempt can succeed."""

    exit_code = ExitCode.TRY_AGAIN


class RemoteError(PodwatchError):
    """The object store or another remote service failed. ``transient``: whether a later attempt can succeed."""

    exit_code = ExitCode.UNAVAILABLE

    def __init__(self, what: str, *, where: str = "", fix: str = "", transient: bool = True) -> None:
        super().__init__(what, where=where, fix=fix)
        self.transient = transient


class IntegrityError(RemoteError):
    """Data from the store is malformed or does not match its recorded size or hash. Never transient for that object."""

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what, where=where, fix=fix, transient=False)


class SaveGone(IntegrityError):  # noqa: N818
    """An object that a pointer or manifest names is not in the store (any more)."""


def is_refusal(error: BaseException) -> bool:
    """Whether retries cannot succeed until an operator changes something: a refused key, a cap, a missing bucket, a
    wrong configuration. An IntegrityError concerns one object and is no refusal."""
    if isinstance(error, IntegrityError):
        return False
    return isinstance(error, (ConfigurationError, PermissionDenied)) or not getattr(error, "transient", True)


class InternalError(PodwatchError):
    """A bug in podwatch; the text asks for a report."""
