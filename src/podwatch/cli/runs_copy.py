"""``podwatch runs copy``: copies a run into another store."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, print_json
from podwatch.cli.offline import checked_run_id
from podwatch.client.times_and_sizes import size
from podwatch.domain.errors import ExitCode, IntegrityError, UsageError

if TYPE_CHECKING:
    from podwatch.sync.runs.copy_run import Copied, CopyPlan, RunPlace


@click.command("copy", short_help="Copy a run into another store, every byte verified.")
@common
@click.argument("run_id", metavar="RUN")
@click.option("--to", "to_url", metavar="URL", required=True, help="The store to copy to, with its prefix.")
@click.option("--from", "from_url", metavar="URL", default="", help="The store to copy from. Default: the configured.")
@click.option("--as", "target_id", metavar="RUN", default="", help="Run id in the target. Default: the same.")
@click.option("--step", "steps", type=click.IntRange(min=0), multiple=True, help="Only this step (repeatable).")
@click.option("--dry-run", is_flag=True, help="Only show what would be copied.")
@json_option
def copy(
    where: Where,
    run_id: str,
    to_url: str,
    from_url: str,
    target_id: str,
    steps: tuple[int, ...],
    dry_run: bool,
    as_json: bool,
) -> None:
    """Copy the checkpoints of RUN, its logs, incidents and configurations into another store of any kind. Every part is
    compared with the hash in its manifest before it is sent, and what the target holds is verified. latest.json is
    written last, and never over another training's. Refused while a podwatch is active on the run in the target. A
    repeated call continues a copy that was interrupted. The source is only read."""
    from podwatch.cli.offline import load
    from podwatch.sync.runs.copy_run import CopyPace, RunCopier
    from podwatch.system.clock import SystemClock

    settings, run = load(where), checked_run_id(run_id)
    source_url = from_url or settings.sync.store
    if not source_url:
        raise UsageError("no store to copy from", fix="set [sync] store, or add --from URL")
    target = checked_run_id(target_id or run)
    with ExitStack() as stack:
        source, sink = _place(stack, settings, source_url, run), _place(stack, settings, to_url, target)
        if (source.store.url, source.keys) == (sink.store.url, sink.keys):
            raise UsageError("the source and the target are the same", where=to_url)
        pace = CopyPace(settings.sync.connections, settings.sync.connections_max)
        copier = RunCopier(source, sink, SystemClock(), pace=pace, notes=settings.state_dir / "copies")
        plan = copier.look(frozenset(steps))
        missing = set(steps) - {s.step for s in (*plan.saves, *plan.there)} - {step for step, _ in plan.left_out}
        if missing or not (plan.saves or plan.there or plan.left_out):
            what = f"step {min(missing)} of run {run} not found" if missing else f"no checkpoints of run {run}"
            raise IntegrityError(what, where=source.where, fix="`podwatch runs list` shows the runs")
        if not as_json:
            click.echo("\n".join(_plan_lines(plan)))
        copied = None if dry_run else copier.carry_out(plan)
    left_out = plan.left_out if copied is None else copied.left_out
    if as_json:
        print_json(_document(run, target, plan, copied))
    elif copied is not None:
        click.echo("\n".join(_result_lines(plan, copied)))
    if left_out:
        raise click.exceptions.Exit(int(ExitCode.FAILED))


def _place(stack: ExitStack, settings: Any, url: str, run: str) -> "RunPlace":
    from podwatch.domain.manifest import Keys
    from podwatch.stores.credentials import credentials_for
    from podwatch.stores.open_store import open_store, parse_store_url
    from podwatch.sync.runs.copy_run import WRITER, RunPlace

    store = open_store(url, credentials_for(settings, url), writer_id=WRITER, connections=settings.sync.connections_max)
    stack.callback(store.close)
    return RunPlace(store, Keys(run, parse_store_url(url).prefix))


def _plan_lines(plan: "CopyPlan") -> list[str]:
    lines = [f"step {s.step}: to copy, {size(s.total_bytes)}" for s in plan.saves]
    lines += [f"step {s.step}: in the target already" for s in plan.there]
    lines += [f"step {step}: LEFT OUT, {clean(reason)}" for step, reason in plan.left_out]
    return [*lines, f"to copy: {size(plan.total_bytes)}"]


def _result_lines(plan: "CopyPlan", copied: "Copied") -> list[str]:
    lines = [
        f"step {step}: LEFT OUT, {clean(reason)}"
        for step, reason in copied.left_out
        if (step, reason) not in plan.left_out
    ]
    lines.append(f"checkpoints in the target: {len(copied.saves)}, every object verified")
    now = "now names what the source's names" if copied.placing.moves else "is unchanged"
    return [*lines, f"latest.json in the target {now}: {clean(copied.placing.reason)}"]


def _document(run: str, target: str, plan: "CopyPlan", copied: "Copied | None") -> dict[str, Any]:
    placing = plan.placing if copied is None else copied.placing
    done = {s.key for s in (plan.there if copied is None else copied.saves)}
    return {
        "schema_version": 1,
        "run_id": run,
        "target_run_id": target,
        "dry_run": copied is None,
        "total_bytes": plan.total_bytes,
        "saves": [
            {"step": s.step, "save_id": s.save_id, "total_bytes": s.total_bytes, "copied": s.key in done}
            for s in (*plan.saves, *plan.there)
        ],
        "left_out": [
            {"step": step, "reason": reason} for step, reason in (plan.left_out if copied is None else copied.left_out)
        ],
        "pointer_moves": placing.moves,
        "pointer": placing.reason,
    }
