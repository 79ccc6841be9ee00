"""``podwatch preempt``: the machine is about to be taken away. For a provider's shutdown hook."""

import time

import click

from podwatch.cli.common import Where, common, json_option, need_daemon, say
from podwatch.client.control import NotRunning, call
from podwatch.domain.errors import Busy

MORE_SECONDS = 2.0
"""Beyond the grace, for the interpreter's own end."""


@click.command("preempt", short_help="This machine is being taken away: say so, end training, leave.")
@common
@click.option("--no-wait", is_flag=True, help="Do not wait until podwatch has left.")
@json_option
def command(where: Where, no_wait: bool, as_json: bool) -> None:
    """Leave because this machine is being taken away, within [recovery] preempt_grace (3 s).

    The heartbeat in the store says `preempted`, so that a replacement goes on at once; an upload in flight finishes if
    it fits; training gets SIGTERM. What is wanted does not change: `podwatch run`, here or elsewhere, goes on training.
    """
    from podwatch.cli.pause import who

    try:
        daemon = need_daemon(where, "say goodbye")
    except NotRunning as error:  # "start it" is the wrong advice for a machine that goes away
        fix = "send training a SIGTERM yourself; the next `podwatch run`, here or elsewhere, goes on"
        raise NotRunning(error.what, where=error.where, fix=fix) from error
    answer = call(daemon.control_path, "preempt", {"by": who()})
    if not no_wait:
        _until_gone(where, float(answer.get("grace_seconds") or 3.0) + MORE_SECONDS)
        answer = {**answer, "message": "preempted: training was told to end, and podwatch has left"}
    say(answer, as_json=as_json)


def _until_gone(where: Where, seconds: float) -> None:
    from podwatch.cli.common import find_daemon

    end = time.monotonic() + seconds
    while find_daemon(where) is not None:
        if time.monotonic() >= end:
            raise Busy(f"podwatch has not left after {seconds:.0f} s", fix="see its log; training may not have ended")
        time.sleep(0.05)
