"""``podwatch start``, ``restart``, ``stop-training``, ``pause``, ``unpause`` and ``preempt``: whether training runs."""

import getpass
import sys
import time
from typing import Any

import click

from podwatch.cli.ask_daemon import NotRunning, ask_status, call
from podwatch.cli.common import (
    Duration,
    Where,
    ask,
    clean,
    common,
    find_daemon,
    json_option,
    need_daemon,
    print_json,
    say,
)
from podwatch.domain.errors import Busy, ExitCode

COMMAND_SHOWN = 60


@click.command("start", short_help="Start training and keep it running.")
@common
@click.option("--step", type=click.IntRange(min=0), help="Resume from this step instead of the newest complete one.")
@click.option("--fresh", is_flag=True, help="Start from the beginning, in a new lineage.")
@click.option("--attach", metavar="PID", type=click.IntRange(min=1), help="Guard this trainer, which you started.")
@click.option(
    "--ignore",
    metavar="PID",
    type=click.IntRange(min=1),
    help="This process is not the run's training: start training although it runs.",
)
@json_option
def start(where: Where, step: int | None, fresh: bool, attach: int | None, ignore: int | None, as_json: bool) -> None:
    """Start training and keep it running, also after a restart of podwatch.

    If you already started a trainer yourself, podwatch guards it and starts no second one. If several processes could
    be this run's trainer, podwatch lists them and asks. If a process could become this run's training, podwatch starts
    nothing: decide with --attach or --ignore.
    """
    if fresh and step is not None:
        raise click.UsageError("--step and --fresh cannot be used together")
    if attach is not None and (fresh or step is not None):
        raise click.UsageError("--attach cannot be used with --step or --fresh: the trainer already runs")
    if attach is not None and ignore is not None:
        raise click.UsageError("--attach and --ignore cannot be used together")
    params: dict[str, Any] = {"step": step, "fresh": fresh, "attach": attach, "ignore": ignore}
    answer = ask(where, "start", params, purpose="start training")
    if answer.get("needs_choice"):
        if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            if as_json:
                print_json(answer)
            else:
                click.echo("\n".join(choices(answer)), err=True)
                click.echo("choose one: podwatch start --attach PID", err=True)
            raise click.exceptions.Exit(int(ExitCode.USAGE))
        click.echo("\n".join(choices(answer)))
        known = click.Choice([str(found["pid"]) for found in answer["candidates"]])
        params["attach"] = int(click.prompt("pid of the trainer to guard", type=known, show_choices=False))
        answer = ask(where, "start", params, purpose="start training")
    say(answer, as_json=as_json)


def choices(answer: dict[str, Any]) -> list[str]:
    """The candidates, two lines each."""
    lines = ["several trainers that podwatch did not start could be this run's:"]
    for found in answer.get("candidates") or []:
        lines.append(f"{found['pid']:>9}  {clean(found['command'])[:COMMAND_SHOWN]}")
        lines.append(f"{'':>9}  {clean(found['reason'])}")
    return lines


# -- restart -------------------------------------------------------------------------------------------------------


SHOWN = 12
"""Number of paths that fit on a screen with the rest of the plan."""


@click.command("restart")
@common
@click.option("--step", type=click.IntRange(min=0), help="Resume from this step instead of the newest complete one.")
@click.option("--dry-run", is_flag=True, help="Only show the step, the files to quarantine, and the command.")
@json_option
def restart(where: Where, step: int | None, dry_run: bool, as_json: bool) -> None:
    """Restart training from a checkpoint.

    It is the newest complete one, or --step."""
    if not dry_run:
        say(ask(where, "restart", {"step": step}, purpose="restart training"), as_json=as_json)
        return
    plan = ask(where, "restart_plan", {"step": step}, purpose="plan a restart")
    say(plan, describe(plan), as_json=as_json)
    if plan.get("possible") is False:
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def describe(plan: dict[str, Any]) -> list[str]:
    """The plan as lines; names of environment variables only, never values."""
    import shlex

    changed = [f"changed since the last start: {clean(name)}" for name in plan.get("changed_since_last_start") or []]
    differs = [f"  {clean(line)}" for line in plan.get("command_difference") or []]
    if differs:
        differs = [
            "the running command (-) differs from the configured one (+), which a restart uses; `podwatch config init"
            " --pid PID` prints the configuration of the running one:",
            *differs,
        ]
    if plan.get("possible") is False:
        return [*differs, f"not possible: {clean(plan.get('reason') or 'unknown reason')}", *changed]
    step = plan.get("step")
    lines = [*differs, *changed]
    lines += [f"from      {'the beginning' if step is None else f'step {step}'}"]
    if plan.get("reason"):
        lines.append(f"because   {clean(plan['reason'])}")
    lines += [f"stop also {clean(command)}" for command in plan.get("stop_also") or []]
    lines += [f"prepares  {clean(command)}" for command in plan.get("start_before") or []]
    lines.append(f"command   {clean(shlex.join(str(a) for a in plan.get('argv') or []))}")
    lines.append(f"in        {clean(plan.get('cwd') or '?')}")
    if plan.get("user"):
        lines.append(f"as        {clean(plan['user'])}")
    if plan.get("environment_names"):
        lines.append(f"with      {clean(', '.join(map(str, plan['environment_names'])))}")
    aside = plan.get("set_aside") or []
    lines.append("moves     " + ("nothing" if not aside else f"{len(aside)} to quarantine (nothing is deleted)"))
    lines += [f"          {clean(path)}" for path in aside[:SHOWN]]
    if len(aside) > SHOWN:
        lines.append(f"          ... and {len(aside) - SHOWN} more (--json lists all)")
    if plan.get("trackers_set_right"):
        names = ", ".join(str(path).rpartition("/")[2] for path in plan["trackers_set_right"])
        lines.append(f'corrects  {clean(names)} (the trainer\'s own "latest")')
    if plan.get("removed_flags"):
        lines.append(f"removes   {clean(' '.join(map(str, plan['removed_flags'])))} (resume flags in the command)")
    return lines


# -- stop ----------------------------------------------------------------------------------------------------------


@click.command("stop-training", short_help="Stop training and keep it stopped.")
@common
@click.option("--after-save", is_flag=True, help="Wait for the next complete checkpoint first.")
@click.option("--wait", "waits", is_flag=True, help="Return when training has ended; Ctrl-C ends only the wait.")
@json_option
def stop_training(where: Where, after_save: bool, waits: bool, as_json: bool) -> None:
    """Stop training until `podwatch start`, also after a restart of podwatch. podwatch keeps guarding the checkpoints.

    With --after-save, training continues until its next checkpoint is complete; if it dies or hangs before, podwatch
    stops it then. If it finishes before, the run is finished, not stopped. `podwatch stop-training` stops it
    immediately; `podwatch start` cancels the request.
    """
    answer = ask(where, "stop_training", {"after_save": after_save}, purpose="stop training")
    if waits:
        if not as_json:
            click.echo(clean(answer.get("message", "")), err=True)
        answer = {"message": _until_ended(where)}
    say(answer, as_json=as_json)


_ENDED, _TRAINS = ("stopped", "finished"), ("starting", "confirming", "running", "attached")
"""Phases of recovery: nothing of training is left; training continues."""
_POLL_SECONDS = 1.0
_GONE_SECONDS = 60.0
"""How long podwatch can be away before the wait ends: init or systemd restarts it within seconds."""


def _until_ended(where: Where) -> str:
    """Wait for the end of training that was asked for; how it ended. Busy if an operator cancels the request,
    NotRunning if podwatch stays away."""
    gone_since: float | None = None
    kept = 0
    while True:
        document = ask_status(where.run, where.config)
        if document.get("running"):
            gone_since = None
            phase, desired = document["recovery"]["phase"], document["daemon"]["desired"]
            if phase in _ENDED:
                return f"training is {document['training']['state']}"
            kept = kept + 1 if desired == "running" and phase in _TRAINS else 0
            if kept > 1:  # one that has just started has not read its records yet
                raise Busy("training was started again, which cancelled the request to stop it")
        elif isinstance(document.get("end"), dict):  # podwatch has ended with its training, as a job does
            return "training has ended"
        elif (gone_since := gone_since or time.monotonic()) + _GONE_SECONDS <= time.monotonic():
            raise NotRunning(
                "podwatch does not answer, so nothing stops training", fix="`podwatch run`: the request still holds"
            )
        time.sleep(_POLL_SECONDS)


@click.command("pause", short_help="Maintenance: podwatch does not stop or start training on its own.")
@common
@click.option(
    "--for", "seconds", metavar="TIME", type=Duration(), help='Duration, for example "2h"; else until `unpause`.'
)
@click.option("--reason", metavar="TEXT", default="", help="Reason, shown in the status.")
@json_option
def pause(where: Where, seconds: float | None, reason: str, as_json: bool) -> None:
    """Pause: podwatch reports problems but does not restart training. Uploads and pruning continue.

    A pause survives a restart of podwatch. The commands start, restart and stop-training still work. If other processes
    use the run's GPUs when the time is over, the pause continues until the GPUs are free.
    """
    params = {"seconds": seconds, "reason": reason, "by": who()}
    say(ask(where, "pause", params, purpose="pause"), as_json=as_json)


def who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, for example in a container
        return ""


@click.command("unpause", short_help="End a pause: podwatch restarts training again when needed.")
@common
@json_option
def unpause(where: Where, as_json: bool) -> None:
    """End the pause. podwatch reacts immediately to problems that it found meanwhile and that still exist."""
    say(ask(where, "unpause", purpose="end the pause"), as_json=as_json)


MORE_SECONDS = 5.0
"""Beyond the grace, for the exit of the interpreter."""


@click.command("preempt", short_help="The provider takes this machine away: end training and stop podwatch.")
@common
@json_option
def preempt(where: Where, as_json: bool) -> None:
    """End training and stop podwatch within [recovery] preempt_grace (3 s): the provider takes this machine away.

    podwatch writes `preempted` into the heartbeat, so that a replacement pod continues immediately, finishes a running
    upload if there is time, sends training SIGTERM, and stores what training saves until it ends. `podwatch run`, here
    or elsewhere, then continues training.
    """
    try:
        daemon = need_daemon(where, "end training")
    except NotRunning as error:  # "start it" is the wrong advice at a preemption
        fix = "send training SIGTERM yourself; the next `podwatch run`, here or elsewhere, continues it"
        raise NotRunning(error.what, where=error.where, fix=fix) from error
    answer = call(daemon.control_path, "preempt", {"by": who()})
    _until_gone(where, float(answer.get("grace_seconds") or 3.0) + MORE_SECONDS)
    say({**answer, "message": "preempted: podwatch sent training SIGTERM and stopped"}, as_json=as_json)


def _until_gone(where: Where, seconds: float) -> None:
    end = time.monotonic() + seconds
    while find_daemon(where) is not None:
        if time.monotonic() >= end:
            raise Busy(
                f"podwatch still runs after {seconds:.0f} s", fix="read its log; check whether training has ended"
            )
        time.sleep(0.05)
