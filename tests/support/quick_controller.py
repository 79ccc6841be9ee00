"""``python -m tests.support.quick_controller ...``: podwatch controller with its waits shortened, for tests on real
time. Only constants of waiting are changed; QUICK_DEAD is what counts as a dead pod, in seconds."""

import os

from podwatch.cli import controller as command
from podwatch.cli import main
from podwatch.controller.run_store import RunStore
from podwatch.policy import replacement

DEAD = float(os.environ.get("QUICK_DEAD") or "0")

if __name__ == "__main__":
    if DEAD:
        replacement.PATIENCE_SECONDS = DEAD  # type: ignore[attr-defined]
        replacement.WATCHED_SECONDS = DEAD / 2  # type: ignore[misc]
        replacement.PREPARE_SECONDS = DEAD / 2  # type: ignore[misc]
        replacement.APPEAR_SECONDS = DEAD  # type: ignore[misc]
        replacement.CONFIRM_SECONDS = DEAD  # type: ignore[misc]
        assert RunStore.__init__.__kwdefaults__ is not None
        RunStore.__init__.__kwdefaults__["wait"] = DEAD / 2
        command.EVERY_SECONDS = 2.0
    main()
