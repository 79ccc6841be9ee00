"""The machine is being taken away: training is told to end, once, and not waited for (DESIGN section 4, "Stop")."""

import signal

from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.intent import IntentKind
from podwatch.journal import Journal
from podwatch.recovery.state import Tools
from podwatch.system.identity import send_signal
from podwatch.trainer.base import TrainerHandle
from podwatch.trainer.handle import KeptTrainer


async def tell_to_end(tools: Tools, handle: TrainerHandle | None, why: str) -> bool:
    """SIGTERM to what trains here, the stop journaled before it; False where nothing does.

    The intent stays open: whoever starts podwatch here next finishes that stop, and what was told to end is not
    counted as a failure. What is wanted does not change. A keeper is told instead of its tree: it passes the signal
    on, outlives us, and sends SIGKILL to what does not heed it.
    """
    if handle is None:  # podwatch may have been about to start it
        handle = (await tools.launcher.look()).handle
    if handle is None or await handle.exit_status() is not None:
        return False
    launcher = handle.launcher
    data = {"start_id": handle.start_id, "why": why, "pid": launcher.pid, "ticks": launcher.start_ticks}
    data["boot"] = launcher.boot_id
    try:
        await tools.journal.run(Journal.open_intent, IntentKind.STOP, data)
    except HostError as error:  # the machine goes in seconds: its last save is worth more than the record of it
        tools.say(EventName.TRAINER_STOPPING, f"this stop cannot be recorded: {error}", Severity.WARNING)
    tools.say(EventName.TRAINER_STOPPING, f"training is told to end: {why}", start_id=handle.start_id)
    await _sigterm(handle)
    return True


async def _sigterm(handle: TrainerHandle) -> None:
    if isinstance(handle, KeptTrainer) and handle.keeper_lives() and send_signal(handle.record.keeper, signal.SIGTERM):
        return
    refused: PodwatchError | None = None
    for process in (await handle.tree()).value or ():
        try:
            send_signal(process.identity, signal.SIGTERM)
        except PodwatchError as error:
            refused = error
    if refused is not None:
        raise refused
