"""Imports structlog without rich: its ``dev`` module imports rich for tracebacks, which podwatch formats itself. The 50
modules take 4 MiB of the daemon's 70."""

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
_hidden = "rich" not in _modules
if _hidden:
    _modules["rich"] = None  # makes importing it fail as if it were not installed
try:
    import structlog
    from structlog.typing import EventDict, WrappedLogger
finally:
    if _hidden:
        del _modules["rich"]

__all__ = ["EventDict", "WrappedLogger", "structlog"]
