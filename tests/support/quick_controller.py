"""``python -m tests.support.quick_controller ...``: podwatch controller with its waits shortened, for tests on real
time. Only constants of waiting are changed; QUICK_DEAD is what counts as a dead pod, in seconds."""

import os

from podwatch.cli import controller as command
from podwatch.cli import main
from podwatch.controller.run_store import RunStore
from podwatch.policy import rented_machines, replacement

DEAD = float(os.environ.get("QUICK_DEAD") or "0")
SHORTENED = {
    "PATIENCE_SECONDS": DEAD,
    "WATCHED_SECONDS": DEAD / 2,
    "PREPARE_SECONDS": DEAD / 2,
    "APPEAR_SECONDS": DEAD,
    "CONFIRM_SECONDS": DEAD,
}

if __name__ == "__main__":
    if DEAD:
        for name, seconds in SHORTENED.items():
            holders = [module for module in (rented_machines, replacement) if hasattr(module, name)]
            assert holders, name
            for module in holders:
                setattr(module, name, seconds)
        assert RunStore.__init__.__kwdefaults__ is not None
        RunStore.__init__.__kwdefaults__["wait"] = DEAD / 2
        command.EVERY_SECONDS = 2.0
    main()
