"""The machine is being taken away: ask training to end, once, and do not wait for it (docs/maintenance.md)."""

import signal

from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.run import IntentKind
from podwatch.journal import Journal
from podwatch.recovery.state import Tools
from podwatch.system.procfs import send_signal
from podwatch.trainer.base import TrainerHandle
from podwatch.trainer.handle import KeptTrainer


async def tell_to_end(tools: Tools, handle: TrainerHandle | None, why: str) -> bool:
    """Journal the stop, then send SIGTERM to the trainer. Return False if none runs.

    The intent stays open: the next podwatch here finishes the stop, and this end does not count as a failure. The
    desired state does not change. If a keeper runs the trainer, only the keeper gets the signal: it passes the signal
    on, outlives podwatch, and sends SIGKILL to processes that do not end.
    """
    if handle is None:  # podwatch may have been starting it
        handle = (await tools.launcher.look()).handle
    if handle is None or await handle.exit_status() is not None:
        return False
    launcher = handle.launcher
    data = {"start_id": handle.start_id, "why": why, "pid": launcher.pid, "ticks": launcher.start_ticks}
    data["boot"] = launcher.boot_id
    try:
        await tools.journal.run(Journal.open_intent, IntentKind.STOP, data)
    except HostError as error:  # the machine is gone in seconds: the last save matters more than this record
        tools.say(EventName.TRAINER_STOPPING, f"cannot record this stop: {error}", Severity.WARNING)
    tools.say(EventName.TRAINER_STOPPING, f"podwatch requests training to end: {why}", start_id=handle.start_id)
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
