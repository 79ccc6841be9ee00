"""The environment of every child: without the store's key, podwatch's own settings and systemd's variables."""

from collections.abc import Mapping

_SERVICE = frozenset(
    {"NOTIFY_SOCKET", "CREDENTIALS_DIRECTORY", "JOURNAL_STREAM", "INVOCATION_ID", "MAINPID", "SYSTEMD_EXEC_PID",
     "MANAGERPID", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CACHE_DIRECTORY", "LOGS_DIRECTORY",
     "CONFIGURATION_DIRECTORY", "FDSTORE"}
)  # fmt: skip
_PREFIXES = ("B2_", "PODWATCH_", "WATCHDOG_", "LISTEN_")


# Set by a virtual environment or our launcher: with them a Python child would import from our environment.
_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH", "PYTHONSAFEPATH", "__PYVENV_LAUNCHER__"})


def scrubbed_environment(environ: Mapping[str, str], *, keep_python: bool = True) -> dict[str, str]:
    """``environ`` without the variables that only podwatch may have (docs/architecture.md).

    Store credentials are secrets, podwatch's own settings would configure a podwatch inside training, and a child that
    inherits NOTIFY_SOCKET or WATCHDOG_* sends in podwatch's name (measured: systemctl did). ``keep_python=False`` also
    drops the variables that make a Python child import our packages.
    """
    return {
        name: value
        for name, value in environ.items()
        if name not in _SERVICE and not name.startswith(_PREFIXES) and (keep_python or name not in _PYTHON)
    }


EXPORTED = frozenset(
    {"PODWATCH_START_ID", "PODWATCH_RUN", "PODWATCH_STEP", "PODWATCH_CHECKPOINT", "PODWATCH_RESUME_ARGS",
     "PODWATCH_NODE_RANK", "PODWATCH_NODE_COUNT"}
)  # fmt: skip
"""The only ``PODWATCH_*`` names training may see; heartbeat URLs start with ``PODWATCH_HEARTBEAT_``."""
