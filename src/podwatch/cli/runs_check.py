"""``podwatch runs check``: is a run well, asked from anywhere with a read key."""

import time
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import (
    Duration,
    MonitoringCommand,
    Where,
    clean,
    colours,
    common,
    for_terminal,
    json_option,
    say,
)
from podwatch.cli.offline import checked_run_id, opened
from podwatch.domain.errors import PodwatchError

if TYPE_CHECKING:
    from podwatch.store.objects.base import Objects
    from podwatch.store.runs.judge import Judgement, Level, Limits
    from podwatch.store.runs.read import RunInStore

LISTING_SECONDS = 40.0
"""For the names of all runs: monitoring waits for an answer, and a store can send page after page without an end."""
_COLOURS = ("green", "yellow", "red", "magenta")

store_option = click.option("--store", metavar="URL", default="", help="The store; no configuration is needed then.")


@click.command("check", cls=MonitoringCommand, short_help="Is a run well? From anywhere with a read key.")
@common
@click.argument("run_id", metavar="[RUN]", default="")
@store_option
@click.option("--dead-after", type=Duration(), help="Without a heartbeat for so long, the run is dead. Default: 5m.")
@json_option
def check(where: Where, run_id: str, store: str, dead_after: float | None, as_json: bool) -> None:
    """Judge a run by its heartbeat, its claims and its newest checkpoint in the store, one line each; without
    RUN the configured run, or with --store every run. Ages are by the store's clock. Works without a daemon, from a
    laptop, cron or CI, with the key in B2_APPLICATION_KEY_ID and B2_APPLICATION_KEY. Exit: 0 ok, 1 warning (no new
    step, upload behind), 2 dead, down, ended without its final checkpoint, or held by no pod, 3 unknown (no answer from
    the store)."""
    from podwatch.store.runs.judge import Level, Limits

    limits = Limits() if dead_after is None else Limits(dead=dead_after, late=min(Limits().late, dead_after))
    try:
        with opened(where, store) as (reading, prefix, own):
            url = reading.url
            found = _judged(reading, prefix, run_id or ("" if store else own), limits)
    except PodwatchError as error:  # on stdout, which monitoring reads: also a missing key or a wrong configuration
        problem = " ".join(str(error).split())
        document = {"schema_version": 1, "store_url": store, "overall": "unknown", "problem": problem, "runs": []}
        say(document, for_terminal(f"UNKNOWN: {clean(problem)}"), as_json=as_json)
        raise click.exceptions.Exit(int(Level.UNKNOWN)) from error
    worst = _worst(found)
    runs = [_document(evidence, judgement) for evidence, judgement in found]
    document = {"schema_version": 1, "store_url": url, "overall": worst.name.lower(), "problem": "", "runs": runs}
    lines = [line for one in found for line in _lines(*one)] or [f"UNKNOWN: no runs in {clean(url)}"]
    say(document, lines, as_json=as_json)
    raise click.exceptions.Exit(int(worst))


def _judged(store: "Objects", prefix: str, run_id: str, limits: "Limits") -> "list[tuple[RunInStore, Judgement]]":
    from podwatch.store.keys import RunKeys
    from podwatch.store.runs.judge import judge
    from podwatch.store.runs.read import read_run_to_check, run_ids

    names = [checked_run_id(run_id)] if run_id else run_ids(store, prefix, LISTING_SECONDS)
    found = (read_run_to_check(store, RunKeys(name, prefix), time.time()) for name in names)
    return [(evidence, judge(evidence, limits)) for evidence in found]


def _worst(found: "list[tuple[RunInStore, Judgement]]") -> "Level":
    """Critical before unknown: what is known to be dead counts more than what cannot be read."""
    from podwatch.store.runs.judge import Level

    order = (Level.OK, Level.WARNING, Level.UNKNOWN, Level.CRITICAL)
    return max((judgement.level for _, judgement in found), key=order.index, default=Level.UNKNOWN)


def _lines(evidence: "RunInStore", judgement: "Judgement") -> list[str]:
    name = judgement.level.name
    first, *more = for_terminal(f"{name} {clean(evidence.run_id)}: {clean(judgement.summary)}")
    word = click.style(name, fg=_COLOURS[judgement.level]) if colours() else name
    return [word + first.removeprefix(name), *more]


def _document(evidence: "RunInStore", judgement: "Judgement") -> dict[str, Any]:
    beat = evidence.active.beat
    return {
        "run_id": evidence.run_id,
        "level": judgement.level.name.lower(),
        "summary": judgement.summary,
        "stored_step": evidence.newest.step,
        "archived": evidence.archived_wall is not None,
        "claim_age_seconds": _rounded(evidence.active.claim_age),
        "heartbeat": None
        if beat is None
        else {
            "age_seconds": _rounded(beat.age),
            "state": beat.said.state,
            "phase": beat.said.phase,
            "desired": beat.said.desired,
            "host": beat.said.host,
            "overall": beat.said.overall,
            "reason": beat.said.reason,
            "step": beat.said.step,
            "step_age_seconds": None if beat.step_age is None else _rounded(beat.step_age + beat.age),
            "unstored_step": beat.said.unstored_step,
            "outcome": beat.said.outcome or None,
            "instance": beat.said.instance.to_dict() if beat.said.instance.provider else None,
        },
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
