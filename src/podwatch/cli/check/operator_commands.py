"""The operator's own commands: whether the hooks can run, and the results of those on ``check`` (docs/hooks.md)."""

import asyncio
import os
from collections.abc import Iterator

from podwatch.cli.check.report import Level, Line
from podwatch.config.settings import HookSettings, Settings

WARNS = 10
"""Exit code of a check that is a warning. Not 1 or 2: a script that crashes or is called wrongly ends with those."""


def hooks(settings: Settings) -> Iterator[Line]:
    """Whether the program of each hook, and of the evaluation, is there. Runs none."""
    if not settings.hooks and not settings.evaluation.command:
        return
    from podwatch.hooks.start_child import problem_of

    for hook in settings.hooks:
        what, fix = problem_of(hook, settings, os.environ)
        if what:
            yield Line("hooks", "fail", f"{hook.name}: {what}", f"{fix} ([[hooks]] {hook.name})")
        else:
            yield Line("hooks", "ok", f"{hook.name}: runs {hook.command[0]} on {', '.join(hook.on)}")

    if settings.evaluation.command:
        what, fix = problem_of(settings.evaluation.as_hook(), settings, os.environ)
        runs = f"runs {settings.evaluation.command[0]}, gpus = {settings.evaluation.gpus}"
        yield Line("evaluation", "fail", what, f"{fix} ([evaluation])") if what else Line("evaluation", "ok", runs)


def checks(settings: Settings) -> Iterator[Line]:
    """Run each hook on ``check``: exit code 0 is ok, 10 a warning, everything else a failure. The last line of
    its output is the text."""
    for hook in settings.hooks:
        if "check" in hook.on:
            # Somebody waits for it: an hour, the default after an event, is too long.
            limit = hook.timeout if "timeout" in hook.model_fields_set else 60.0
            yield _result(hook.model_copy(update={"timeout": limit}), settings)


def _result(check: HookSettings, settings: Settings) -> Line:
    from podwatch.hooks.start_child import order_for, problem_of, run

    what, fix = problem_of(check, settings, os.environ)
    if what:
        return Line(check.name, "fail", what, f"{fix} ([[hooks]] {check.name})")
    document = {
        "schema_version": 1,
        "check": check.name,
        "run_id": settings.run_id,
        "output_dir": str(settings.trainer.output_dir),
        "command": list(settings.trainer.command),
    }
    own = {"PODWATCH_HOOK_RUN_ID": settings.run_id, "PODWATCH_HOOK_OUTPUT_DIR": str(settings.trainer.output_dir)}
    order = order_for(check, settings, os.environ, own=own, document=document, title=check.name, state=None)
    result = asyncio.run(run(order))
    levels: dict[int | None, Level] = {0: "ok", WARNS: "warn"}
    level = "fail" if result.timed_out or result.problem else levels.get(result.code, "fail")
    text = result.why(check.timeout) if level == "fail" else result.last_line or f"exit code {result.code}"
    return Line(check.name, level, text, f"correct what it found, or [[hooks]] {check.name}")
