"""structlog without rich: its ``dev`` module imports rich for tracebacks that we format ourselves, and those 50 modules
are 4 MiB of a daemon that has 70."""

import sys
from typing import Any

_modules: dict[str, Any] = sys.modules
_hidden = "rich" not in _modules
if _hidden:
    _modules["rich"] = None  # importing it now says that it is not installed
try:
    import structlog
    from structlog.typing import EventDict, WrappedLogger
finally:
    if _hidden:
        del _modules["rich"]

__all__ = ["EventDict", "WrappedLogger", "structlog"]
