"""``podwatch preempt``: stop because the provider takes this machine away. For a provider's shutdown hook."""

import time

import click

from podwatch.cli.common import Where, common, json_option, need_daemon, say
from podwatch.client.api import NotRunning, call
from podwatch.domain.errors import Busy

MORE_SECONDS = 2.0
"""Beyond the grace, for the exit of the interpreter."""


@click.command("preempt", short_help="The provider takes this machine away: end training and stop podwatch.")
@common
@click.option("--no-wait", is_flag=True, help="Do not wait until podwatch has stopped.")
@json_option
def command(where: Where, no_wait: bool, as_json: bool) -> None:
    """End training and stop podwatch within [recovery] preempt_grace (3 s): the provider takes this machine away.

    podwatch writes `preempted` into the heartbeat, so that a replacement pod continues immediately, finishes a running
    upload if there is time, and sends training SIGTERM. `podwatch run`, here or elsewhere, then continues training.
    """
    from podwatch.cli.pause import who

    try:
        daemon = need_daemon(where, "end training")
    except NotRunning as error:  # "start it" is the wrong advice at a preemption
        fix = "send training SIGTERM yourself; the next `podwatch run`, here or elsewhere, continues it"
        raise NotRunning(error.what, where=error.where, fix=fix) from error
    answer = call(daemon.control_path, "preempt", {"by": who()})
    if not no_wait:
        _until_gone(where, float(answer.get("grace_seconds") or 3.0) + MORE_SECONDS)
        answer = {**answer, "message": "preempted: podwatch sent training SIGTERM and stopped"}
    say(answer, as_json=as_json)


def _until_gone(where: Where, seconds: float) -> None:
    from podwatch.cli.common import find_daemon

    end = time.monotonic() + seconds
    while find_daemon(where) is not None:
        if time.monotonic() >= end:
            raise Busy(
                f"podwatch still runs after {seconds:.0f} s", fix="read its log; check whether training has ended"
            )
        time.sleep(0.05)
