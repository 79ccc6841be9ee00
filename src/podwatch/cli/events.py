"""What happened: ``podwatch events``, ``podwatch incidents`` (each failure and podwatch's reaction) and ``podwatch
logs``.

Events and incidents come from the daemon, or from the journal without one. Logs are printed without secrets, because
they are shared and pasted into issues.
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podwatch.cli.ask_daemon import ask_status
from podwatch.cli.common import Where, ask_if_it_runs, clean, common, for_terminal, json_option, moment, say
from podwatch.domain.errors import HostError, PermissionDenied, PodwatchError, UsageError
from podwatch.domain.finding import Agreement, counted
from podwatch.domain.secrets import scrub
from podwatch.domain.times import amount, from_rfc3339, local, span

if TYPE_CHECKING:
    from podwatch.domain.account_document import LossDocument
    from podwatch.domain.status_document import IncidentDocument
    from podwatch.journal import Journal
    from podwatch.report.run_cost import Account

POLL_SECONDS = 1.0


@click.command("events")
@common
@click.option("--follow", "-f", is_flag=True, help="Continue with new events until Ctrl-C.")
@click.option("--since", metavar="TIME", default="", help='Start time: "2h" (2 hours ago), or a UTC time ending in Z.')
@click.option("-n", "--limit", type=click.IntRange(min=1, max=1000), default=100, show_default=True)
@json_option
def events(where: Where, follow: bool, since: str, limit: int, as_json: bool) -> None:
    """List events, oldest first. --json prints one JSON object per line."""
    last = 0
    try:
        for event in fetch_events(where, since_wall=moment("--since", since) or 0.0, limit=limit):
            last = max(last, int(event.get("id") or 0))
            _show(event, as_json)
        if not last and not follow and not as_json:
            click.echo("no events")
        while follow:
            time.sleep(POLL_SECONDS)
            for event in fetch_events(where, after_id=last, limit=1000):
                last = max(last, int(event.get("id") or 0))
                _show(event, as_json)
    except KeyboardInterrupt:
        pass


def fetch_events(where: Where, *, after_id: int = 0, since_wall: float = 0.0, limit: int) -> list[dict[str, Any]]:
    """Event documents, oldest first. Without a daemon they come from the journal on disk."""
    answer = ask_if_it_runs(where, "events", {"after_id": after_id, "since_wall": since_wall, "limit": limit})
    if answer is not None:
        return list(answer["events"])
    from podwatch.cli.offline import read_journal
    from podwatch.report.json_documents import event_document

    with read_journal(where) as journal:
        found_events = journal.events(after_id=after_id, since_wall=since_wall, limit=limit)
        return [event_document(e) for e in found_events]


def event_line(event: Mapping[str, Any], now: float) -> str:
    """One event as text."""
    at = local(from_rfc3339(event.get("at")), now)
    mark = {"critical": "!!", "warning": "! "}.get(str(event.get("severity")), "  ")
    return f"{at}  {mark} {clean(event.get('name')):<20} {clean(event.get('message'))}"


def _show(event: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(event, ensure_ascii=False))
    else:
        click.echo("\n".join(for_terminal(event_line(event, time.time()), rest="    ")))


@click.command("incidents", short_help="List incidents, or show one with its evidence.")
@common
@click.argument("incident_id", metavar="[ID]", required=False, type=click.IntRange(min=1))
@json_option
def incidents(where: Where, incident_id: int | None, as_json: bool) -> None:
    """List incidents, newest first; with an ID, show everything about that one."""
    found = fetch_incidents(where, incident_id)
    if incident_id is not None and not found:
        raise UsageError(f"incident {incident_id} not found", fix="list them with `podwatch incidents`")
    if incident_id is not None:
        say(found[0].to_json(), [*describe_incident(found[0], time.time()), *log_lines(found[0])], as_json=as_json)
        return
    from podwatch.report.rows import incident_text

    lines = [f"{one.id:>4}  {clean(incident_text(one, time.time()))}" for one in found] or [NONE]
    say({"schema_version": 1, "incidents": [one.to_json() for one in found]}, lines, as_json=as_json)


NONE = "no incidents: podwatch has handled no failure of this run; `podwatch status` shows what needs attention"


def fetch_incidents(where: Where, incident_id: int | None) -> "list[IncidentDocument]":
    """Newest first, from the daemon, else from the journal on disk."""
    from podwatch.domain.status_document import IncidentDocument

    answer = ask_if_it_runs(where, "incidents", {"id": incident_id})
    if answer is not None:
        return [IncidentDocument.from_json(found) for found in answer["incidents"]]
    from podwatch.cli.offline import read_journal
    from podwatch.report.json_documents import incident_document

    with read_journal(where) as journal:
        account = kept_account(journal)
        found = journal.incidents() if incident_id is None else filter(None, [journal.incident(incident_id)])
        return [incident_document(one, account) for one in found]


def kept_account(journal: "Journal") -> "Account | None":
    """The run's account as the last podwatch kept it; without money, because no configuration is read."""
    from podwatch.report.run_cost import COST_KEY, Price, Spent, account

    kept = journal.learned(COST_KEY)
    spent = Spent.kept(kept.get("spent")) if isinstance(kept, dict) else None
    return None if spent is None else account(spent, journal.incidents(), time.time(), price=Price())


def describe_incident(incident: "IncidentDocument", now: float) -> list[str]:
    """Everything about one incident, evidence included."""
    opened, closed, lost = incident.opened_at, incident.closed_at, incident.lost_steps
    rows = [("opened", local(opened, now))]
    if opened is not None and closed is not None:
        rows.append(("closed", f"{local(closed, now)}, after {span(closed - opened)}"))
    rows.append(("done", incident.resolution))
    rows.append(("resumed", "" if incident.resumed_step is None else str(incident.resumed_step)))
    rows.append(("lost", "" if lost is None else counted(lost, "step")))
    rows.append(("files", incident.bundle))
    rows.append(("cost", "" if incident.cost is None else _loss(incident.cost)))
    for item in () if isinstance(incident.evidence, str) else incident.evidence:
        rows.append(("evidence", f"{item.signal}: {item.value} ({_WEIGHTS[item.agreement]})"))
    return [
        f"incident {incident.id}: {clean(incident.kind)}, {clean(incident.summary)}",
        *(f"{label:<9} {clean(text)}" for label, text in rows if text),
    ]


def _loss(cost: "LossDocument") -> str:
    text = f"{span(cost.without_training_seconds)} without training"
    if cost.lost_training_seconds:
        text += f", {span(cost.lost_training_seconds)} of training lost"
    return text if cost.money is None else f"{text}, {amount(cost.money, cost.currency)}"


_WEIGHTS = {
    Agreement.AGREES: "confirms it",
    Agreement.DISAGREES: "contradicts it",
    Agreement.UNAVAILABLE: "not observed",
}
"""What a piece of evidence means for the verdict."""


def log_lines(incident: "IncidentDocument") -> list[str]:
    """The relevant last log lines from the incident bundle, without those of the incident before; empty without a
    bundle."""
    from podwatch.journal.explaining_line import highlights, since

    if not incident.bundle:
        return []
    bundle = Path(incident.bundle)
    try:
        logs = _bundled_logs(bundle)
    except OSError as error:
        return [f"logs      cannot be read: {error.strerror} ({clean(bundle)})"]
    before: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        earlier = [int(p.name) for p in bundle.parent.iterdir() if p.name.isdecimal()]
        last = max((number for number in earlier if number < incident.id), default=None)
        before = {} if last is None else _bundled_logs(bundle.with_name(str(last)))
    new = {name: since(before.get(name, ()), lines) for name, lines in logs.items()}
    return [f"log       {name}: {clean(line)}" for name, line in highlights(new)]


def _bundled_logs(bundle: Path) -> dict[str, list[str]]:
    """The log tails of an incident bundle. Raises OSError."""
    from podwatch.journal.bundle import TABLES

    found = (path for path in sorted(bundle.iterdir()) if path.name not in TABLES)
    return {path.name: path.read_text(errors="replace").splitlines() for path in found}


@click.command("logs", short_help="Print the end of the trainer's log.")
@common
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines, through rotations, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=50, show_default=True, help="Number of last lines.")
def logs(where: Where, follow: bool, lines: int) -> None:
    """Print the end of the log with the trainer's stdout and stderr. Secrets are removed from the output, not from the
    file."""
    document = ask_status(where.run, where.config)
    name = str((document.get("training") or {}).get("log_path") or "")
    if not name:
        raise HostError(
            "no log file known",
            fix="start podwatch; if podwatch did not start the trainer, read the trainer's own log",
        )
    _refuse_unreadable(Path(name))
    _learn_secrets(where)
    words = ["tail", "-n", str(lines), *(["-F"] if follow else []), "--", name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tail:
        assert tail.stdout is not None
        held = b""
        """The line that is still being written: half a secret would not be recognised."""
        try:
            while block := _read_what_is_there(tail.stdout.fileno()):
                whole, newline, rest = (held + block).rpartition(b"\n")
                held = rest if len(rest) < MOST_AT_ONCE else b""
                if held and not select.select([tail.stdout], [], [], UNFINISHED_SECONDS)[0]:
                    held = b""  # a progress bar
                _write(whole + newline if held else whole + newline + rest)
            _write(held)
        except KeyboardInterrupt:
            pass
        finally:
            tail.kill()


MOST_AT_ONCE = 1 << 20
UNFINISHED_SECONDS = 0.5
PAUSE_SECONDS = 0.05
"""Between two writes of `tail` that belong together."""


def _read_what_is_there(descriptor: int) -> bytes:
    """What comes without a pause, so that a secret of several lines is seen whole; empty at the end."""
    found = block = os.read(descriptor, MOST_AT_ONCE)
    while block and len(found) < MOST_AT_ONCE and select.select([descriptor], [], [], PAUSE_SECONDS)[0]:
        block = os.read(descriptor, MOST_AT_ONCE)
        found += block
    return found


def _refuse_unreadable(path: Path) -> None:
    try:
        path.open("rb").close()
    except PermissionError as error:
        raise PermissionDenied(
            "Permission denied: cannot read the log", where=str(path), fix="run the command as root"
        ) from error
    except OSError as error:
        raise HostError(
            f"cannot read the log: {error.strerror}", where=str(path), fix="see `podwatch status`"
        ) from error


def _learn_secrets(where: Where) -> None:
    """Register the secrets of the configuration and its files with the scrubber, as far as this user can read them."""
    from podwatch.app.settings_in_force import learn_secrets
    from podwatch.config.loading import load_settings

    with contextlib.suppress(PodwatchError):
        learn_secrets(load_settings(where.path, environ=os.environ, run=where.run).settings)


def _write(data: bytes) -> None:
    """Write ``data`` without secrets, and to a terminal also without control characters."""
    if not data:
        return
    text = scrub(data.decode("utf-8", "surrogateescape"))
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "" for c in text)
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.flush()
