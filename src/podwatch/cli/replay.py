"""``podwatch replay``: run the detection rules over a recording and show what they would have done. Needs no daemon."""

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.common import Where, clean, common, json_option, moment, say
from podwatch.domain.errors import HostError
from podwatch.domain.times import rfc3339, span

if TYPE_CHECKING:
    from podwatch.config.settings import Policies
    from podwatch.recording.replay import Replay, ReplayedFinding

SHOWN_GAPS = 10


@click.command("replay", short_help="Show what podwatch would have done in a recorded night.")
@common
@click.argument("path", metavar="[FILE|DIR]", required=False, type=click.Path(path_type=Path))
@click.option("--since", metavar="TIME", default="", help='Start: "8h" (8 hours ago), or a UTC time ending in Z.')
@click.option("--until", metavar="TIME", default="", help="End, in the same form.")
@json_option
def command(where: Where, path: Path | None, since: str, until: str, as_json: bool) -> None:
    """Run the rules of this podwatch over a recording, and show what podwatch would have done.

    Without FILE: the recording of the configured run. Thresholds: those of the recording, or with -c FILE those of that
    configuration. Changes nothing.
    """
    from podwatch.recording.format import read_recording
    from podwatch.recording.replay import Replay, replay

    begin, end = moment("--since", since), moment("--until", until)
    result = Replay()
    segments = read_recording(path if path is not None else _own_recording(where))
    policies = _policies(where) if where.config else None
    turns = replay(
        segments,
        result,
        policies=policies,
        since=float("-inf") if begin is None else begin,
        until=float("inf") if end is None else end,
    )
    for told in turns:
        if not as_json:
            click.echo("\n".join(describe(told)))
    say(document(result), summary(result, by=where.config), as_json=as_json)


def describe(told: "ReplayedFinding") -> list[str]:
    """A finding as it is raised, or the line that it is cleared."""
    finding = told.finding
    what = f"{finding.kind}{f' {finding.subject}' if finding.subject else ''}"
    if told.cleared_at is not None:
        return [f"{_at(told.cleared_at)}     cleared: {clean(what)}"]
    mark = {"critical": "!!", "warning": "! "}.get(str(finding.severity), "  ")
    act = f"WOULD {str(finding.verdict).upper()}: " if told.acts else ""
    lines = [f"{_at(told.at)}  {mark} {act}{clean(what)}: {clean(finding.summary)}"]
    for one in finding.evidence:
        window = f", {one.window_seconds:.0f} s" if one.window_seconds else ""
        lines.append(f"{'':16}{clean(one.signal)}: {clean(one.value)} ({one.agreement}{window})")
    return lines


def summary(result: "Replay", *, by: str = "") -> list[str]:
    """The summary: time range, gaps, restarts, warnings."""
    from podwatch.domain.finding import Severity, Verdict

    lines = [""] if result.told else []
    if result.begin is None or result.end is None:
        return [*lines, "nothing was recorded in that time", *(f"problem: {clean(p)}" for p in result.problems)]
    names = ", ".join(sorted({clean(h.run_id) for h in result.headers}))
    lines.append(
        f"run {names}: {_at(result.begin)} to {_at(result.end)}, {span(result.seconds)} recorded in"
        f" {result.turns} ticks; thresholds {f'of {clean(by)}' if by else 'as recorded'}"
    )
    for gap in result.gaps[:SHOWN_GAPS]:
        text = f"not recorded: {_at(gap.begin)} to {_at(gap.end)} ({span(gap.end - gap.begin)})"
        lines.append(text + ": podwatch did not run, or was too slow to record")
    if len(result.gaps) > SHOWN_GAPS:
        lines.append(f"... and {len(result.gaps) - SHOWN_GAPS} more gaps (--json lists all)")
    lines += [f"problem: {clean(p)}" for p in result.problems]
    for verdict, past in ((Verdict.RESTART, "restarted"), (Verdict.FINISH, "ended the finished training")):
        acted = result.acted(verdict)
        if acted or verdict is Verdict.RESTART:
            text = f"podwatch would have {past} {len(acted)} time{'' if len(acted) == 1 else 's'}"
            lines.append(text + (": " + ", ".join(_at(t.at) for t in acted) if acted else ""))
    warned = Counter(str(t.finding.kind) for t in result.told if not t.acts and t.finding.severity is not Severity.INFO)
    if warned:
        lines.append(
            "podwatch would have warned of " + ", ".join(f"{kind} ({n})" for kind, n in sorted(warned.items()))
        )
    return lines


def _at(wall: float) -> str:
    """Local time with seconds, because the delay of a detection matters."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall))
    except (OverflowError, ValueError, OSError):  # a damaged file can contain any number
        return "?"


def document(result: "Replay") -> dict[str, Any]:
    """docs/json.md, "Replay"."""
    from podwatch.domain.finding import Verdict

    def acts(verdict: Verdict) -> list[str | None]:
        return [rfc3339(t.at) for t in result.acted(verdict)]

    return {
        "schema_version": 1,
        "run_ids": sorted({h.run_id for h in result.headers}),
        "recorded_by": sorted({h.version for h in result.headers}),
        "from_at": rfc3339(result.begin),
        "to_at": rfc3339(result.end),
        "recorded_seconds": round(result.seconds, 3),
        "turns": result.turns,
        "sessions": result.sessions,
        "gaps": [
            {"from_at": rfc3339(g.begin), "to_at": rfc3339(g.end), "for_seconds": round(g.end - g.begin, 3)}
            for g in result.gaps
        ],
        "problems": list(result.problems),
        "would_restart_at": acts(Verdict.RESTART),
        "would_finish_at": acts(Verdict.FINISH),
        "findings": [_told(t) for t in result.told],
    }


def _told(told: "ReplayedFinding") -> dict[str, Any]:
    from podwatch.report.json_documents import finding_document

    seconds = max(0.0, told.at - told.since)
    return {
        "at": rfc3339(told.at),
        "cleared_at": rfc3339(told.cleared_at),
        "acts": told.acts,
        "start_id": told.start_id,
        **finding_document(told.finding, since_wall=told.since, for_seconds=seconds).to_json(),
    }


def _own_recording(where: Where) -> Path:
    from podwatch.app.paths_and_run_lock import RECORDING
    from podwatch.cli.offline import load
    from podwatch.config.problems import ConfigurationProblems
    from podwatch.domain.errors import ConfigurationError

    try:
        settings = load(where)
    except ConfigurationProblems:
        raise  # there is a file; the error lists its problems
    except ConfigurationError as error:
        raise ConfigurationError(
            f"no recording given, and {error.what}",
            where=error.where,
            fix="give a recording (`podwatch replay FILE`), or a configuration with -c FILE",
        ) from error
    path = settings.state_dir / settings.run_id / RECORDING
    if not path.is_dir():
        raise HostError(
            f"run {settings.run_id} has no recording yet",
            where=str(path),
            fix="`podwatch run` records with [record] enabled = true; or give a FILE",
        )
    return path


def _policies(where: Where) -> "Policies":
    """The thresholds of the given configuration."""
    from podwatch.app.settings_in_force import policies_from
    from podwatch.cli.offline import load

    return policies_from(load(where), max_steps=None)
