"""Environment variables that podwatch sets for its own daemon: by init, and by the `podwatch run` that was typed."""

from typing import Final

UNDER_INIT: Final = "PODWATCH_UNDER_INIT"
"""By init: ``pid1`` or ``job`` (SIGTERM means preemption), or ``detached`` (SIGTERM means that podwatch exits). The
daemon starts no other init."""
JOB_PIPE: Final = "PODWATCH_JOB_PIPE"
"""By init in job mode: the descriptor that the daemon passes to supervisors."""
JOB_PROCESS: Final = "PODWATCH_JOB_PROCESS"
"""By init in job mode: "boot id:pid namespace:pid:start ticks" of init, the identity of this attempt."""
SILENT_SECONDS: Final = "PODWATCH_SILENT_SECONDS"
"""By init where the previous daemon missed its watchdog: seconds without a responding daemon before this one."""
FLAGS: Final = {
    "adopt_existing": "PODWATCH_ADOPT",
    "take_over": "PODWATCH_TAKE_OVER",
    "fresh": "PODWATCH_FRESH",
    "retry": "PODWATCH_RETRY",
}
"""Flag of `podwatch run` -> the variable with the id of an operator's request, which is executed once although init
restarts the daemon."""
BY_HAND: Final = "PODWATCH_BY_HAND"
"""Id of a `podwatch run` that was typed on a terminal: the daemon then skips a running backoff."""
