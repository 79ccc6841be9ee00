"""The digest: the state of the run in one message, from the rows of the status document. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from podwatch.domain.document import Document, Real
from podwatch.domain.event import Change, Notice, Topic
from podwatch.domain.finding import Severity
from podwatch.domain.times import from_rfc3339


@dataclass(frozen=True, slots=True)
class LastDigest(Document):
    """When the last one was sent, in epoch seconds."""

    FILE = "last digest"

    wall: Real


def notice(document: Mapping[str, Any], wall: float) -> Notice:
    """The digest of the status ``document`` at ``wall`` (epoch seconds)."""
    step, progress = document["training"]["step"], _facts(document).get("progress")
    title = "digest" if step is None else f"digest: step {step}"
    if progress:
        title += f", {progress}"
    fixes = (str(problem["suggestion"]).partition("\n")[0] for problem in _problems(document))
    return Notice(
        Topic.DIGEST,
        Change.HAPPENED,
        Severity.INFO,
        title,
        text(document),
        str(Topic.DIGEST),
        from_rfc3339(document["time"]) or wall,
        do="; ".join(dict.fromkeys(fix for fix in fixes if fix)) or "nothing",
    )


def text(document: Mapping[str, Any]) -> str:
    """The state of the run in a few sentences, a line each."""
    facts = _facts(document)
    lines = [
        f"{document['headline']}.",
        f"{document['not_backed_up']}." if document["not_backed_up"] else "",
        *(
            f"{label.capitalize()}: {facts[label]}."
            for label in ("progress", "disk", "checkpoint", "store", "upload", "last death", "goodput")
            if label in facts
        ),
        *(f"Open ({problem['severity']}): {problem['summary']}." for problem in _problems(document)),
    ]
    return "\n".join(line for line in lines if line)


def _facts(document: Mapping[str, Any]) -> dict[str, str]:
    return {row["label"]: row["text"] for row in document["rows"]}


def _problems(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [reason for reason in document["reasons"] if reason["severity"] != "info"]
