"""``podwatch incidents``: the failures of the run, and podwatch's reaction to each."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from podwatch.cli.common import Where, clean, common, find_daemon, json_option, print_json
from podwatch.client.api import NotRunning, call
from podwatch.client.format import from_rfc3339, local, span
from podwatch.domain.errors import UsageError


@click.command("incidents", short_help="List incidents, or show one with its evidence.")
@common
@click.argument("incident_id", metavar="[ID]", required=False, type=click.IntRange(min=1))
@json_option
def command(where: Where, incident_id: int | None, as_json: bool) -> None:
    """List incidents, newest first; with an ID, show everything about that one."""
    found = fetch(where, incident_id)
    if incident_id is not None and not found:
        raise UsageError(f"incident {incident_id} not found", fix="list them with `podwatch incidents`")
    if as_json:
        print_json(found[0] if incident_id is not None else {"schema_version": 1, "incidents": found})
    elif incident_id is not None:
        click.echo("\n".join([*describe(found[0], time.time()), *log_lines(found[0])]))
    else:
        click.echo("\n".join(line(i, time.time()) for i in found) or NONE)


NONE = "no incidents: no failure has stopped this run; `podwatch status` shows what else needs attention"


def fetch(where: Where, incident_id: int | None) -> list[dict[str, Any]]:
    """Incident documents, newest first, from the daemon, else from the journal on disk."""
    daemon = find_daemon(where)
    if daemon is not None:
        try:
            return list(call(daemon.control_path, "incidents", {"id": incident_id})["incidents"])
        except NotRunning:
            pass  # it has just stopped
    from podwatch.cli.offline import read_journal
    from podwatch.reporting.documents import incident_document

    with read_journal(where) as journal:
        if incident_id is not None:
            one = journal.incident(incident_id)
            return [] if one is None else [incident_document(one)]
        return [incident_document(i) for i in journal.incidents()]


def line(incident: Mapping[str, Any], now: float) -> str:
    """One incident as one line."""
    done = clean(incident.get("resolution") or "") or ("open" if incident.get("open") else "closed")
    at = local(from_rfc3339(incident.get("opened_at")), now)
    if incident.get("lost_steps") is not None:
        done += f" ({_lost(incident['lost_steps'])})"
    return f"{incident.get('id'):>4}  {at}  {clean(incident.get('kind'))}: {clean(incident.get('summary'))} -> {done}"


def _lost(steps: object) -> str:
    return "no step lost" if steps == 0 else "1 step lost" if steps == 1 else f"{clean(steps)} steps lost"


def describe(incident: Mapping[str, Any], now: float) -> list[str]:
    """Everything about one incident, evidence included."""
    opened, closed = from_rfc3339(incident.get("opened_at")), from_rfc3339(incident.get("closed_at"))
    lines = [f"incident {incident.get('id')}: {clean(incident.get('kind'))}, {clean(incident.get('summary'))}"]
    lines.append(f"opened    {local(opened, now)}")
    if opened is not None and closed is not None:
        lines.append(f"closed    {local(closed, now)}, after {span(closed - opened)}")
    for label, key in (
        ("done", "resolution"),
        ("resumed", "resumed_step"),
        ("lost", "lost_steps"),
        ("files", "bundle"),
    ):
        if incident.get(key) not in (None, ""):
            text = _lost(incident[key]).removesuffix(" lost") if label == "lost" else clean(incident[key])
            lines.append(f"{label:<9} {text}")
    evidence = incident.get("evidence")
    for item in evidence if isinstance(evidence, list) else []:
        if isinstance(item, dict):
            lines.append(
                f"evidence  {clean(item.get('signal'))}: {clean(item.get('value'))} ({_weight(item.get('agreement'))})"
            )
    return lines


def _weight(agreement: object) -> str:
    """The meaning of a piece of evidence for the verdict."""
    words = {"agrees": "confirms it", "disagrees": "contradicts it", "unavailable": "not observed"}
    return words.get(str(agreement), clean(agreement))


def log_lines(incident: Mapping[str, Any]) -> list[str]:
    """The relevant last log lines from the incident bundle; empty without a bundle."""
    from podwatch.incidents.bundle import TABLES
    from podwatch.incidents.highlights import highlights

    bundle = clean(incident.get("bundle") or "")
    if not bundle:
        return []
    logs: dict[str, list[str]] = {}
    try:
        for path in sorted(Path(bundle).iterdir()):
            if path.name not in TABLES:
                logs[path.name] = path.read_text(errors="replace").splitlines()
    except OSError as error:
        return [f"logs      cannot be read: {error.strerror} ({clean(bundle)})"]
    return [f"log       {name}: {clean(line)}" for name, line in highlights(logs)]
