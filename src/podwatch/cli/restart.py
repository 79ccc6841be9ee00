"""``podwatch restart``: stop, prepare and start training; with ``--dry-run`` only show the plan."""

from typing import Any

import click

from podwatch.cli.common import Where, ask, clean, common, json_option, print_json, say
from podwatch.domain.errors import ExitCode

SHOWN = 12
"""Number of paths that fit on a screen with the rest of the plan."""


@click.command("restart")
@common
@click.option("--step", type=click.IntRange(min=0), help="Resume from this step instead of the newest complete one.")
@click.option("--dry-run", is_flag=True, help="Only show the step, the files to quarantine, and the command.")
@json_option
def command(where: Where, step: int | None, dry_run: bool, as_json: bool) -> None:
    """Restart training from a checkpoint.

    It is the newest complete one, or --step."""
    if not dry_run:
        say(ask(where, "restart", {"step": step}, purpose="restart training"), as_json=as_json)
        return
    plan = ask(where, "restart_plan", {"step": step}, purpose="plan a restart")
    if as_json:
        print_json(plan)
    else:
        click.echo("\n".join(describe(plan)))
    if plan.get("possible") is False:
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def describe(plan: dict[str, Any]) -> list[str]:
    """The plan as lines; names of environment variables only, never values."""
    import shlex

    changed = [f"changed since the last start: {clean(name)}" for name in plan.get("changed_since_last_start") or []]
    differs = [f"  {clean(line)}" for line in plan.get("command_difference") or []]
    if differs:
        differs = [
            "the running command (-) differs from the configured one (+), which a restart uses; `podwatch config adopt`"
            " writes the running one into the configuration:",
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
