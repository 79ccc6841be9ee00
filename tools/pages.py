"""What pages take from the code: the skeleton of docs/runbook.md (an entry for each finding kind, with a line of facts,
and a row for each exit code), and the README's screen.

    python tools/pages.py     # renews both, adds entries that are missing, and lists what has to be written by hand
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from podwatch.detection.rules import RULES
from podwatch.domain.errors import ExitCode
from podwatch.domain.finding import DEATHS, Finding, FindingKind, Severity
from podwatch.report.alerts import topic_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "runbook.md"
SOURCE = ROOT / "src" / "podwatch"
PARTS = ("meaning", "podwatch", "You")
"""The paragraph below the facts, and the two list items that follow it."""
TODO = "TODO"
ORDER = tuple(severity.value for severity in (Severity.CRITICAL, Severity.WARNING, Severity.INFO))
RAISED = {"Finding", "_own", "add"}
"""Calls that make a finding, with the kind as their first argument."""
ELSEWHERE = {
    FindingKind.SAVES_NOTHING: {"critical"},
    FindingKind.NOT_COMPLETE: {"critical"},
    FindingKind.CHECKPOINT_OVERDUE: {"critical"},
    FindingKind.FOREIGN_CHECKPOINTS: {"critical"},
    FindingKind.SILENT_DEATH: {"critical", "warning"},
    FindingKind.REQUIRED_CHILD_EXITED: {"critical", "warning"},
    FindingKind.HANG: {"critical", "warning"},
    FindingKind.INODES_LOW: {"warning"},
    FindingKind.FILES_LOW: {"critical", "warning"},
    FindingKind.MEMORY_LOW: {"critical", "warning"},
    FindingKind.SHM_LOW: {"critical", "warning"},
}
"""Severities that are computed: app/lost_saves.py, recovery/decide.py, detection/window.py, detection/warnings.py.
"""
RESTARTED = frozenset(DEATHS)

README = ROOT / "README.md"
SCREEN = ROOT / "tests" / "report" / "golden" / "status-after-recovery.txt"
SHOWN = re.compile(r"(^    \$ podwatch status\n)(.*?)(?=^\S)", re.MULTILINE | re.DOTALL)

ENTRY = re.compile(r"^### ([a-z0-9-]+)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
FACTS = re.compile(r"\A\n?\*[^\n]*\*\n")
CODE_ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)


def _names(node: ast.AST, of: str) -> set[str]:
    """X of each ``of.X`` below this node."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return {n.attr for n in found if isinstance(n.value, ast.Name) and n.value.id == of}


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _raised() -> Iterator[tuple[str, set[str]]]:
    """(kind, severities) of each place in the code that makes a finding."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for function in ast.walk(ast.parse(text)) if "FindingKind." in text else ():
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and _called(call) == "Decision":
                    yield from _decided(call, function)
                if not isinstance(call, ast.Call) or _called(call) not in RAISED or not call.args:
                    continue
                rest = [*call.args[1:], *(word.value for word in call.keywords)]
                written = set().union(*(_names(node, "Severity") for node in rest)) if rest else set()
                for kind in _names(call.args[0], "FindingKind"):
                    yield kind, written or _names(function, "Severity")


def _decided(call: ast.Call, function: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """The same of a decision about training, which is critical unless it says otherwise."""
    words = {word.arg: word.value for word in call.keywords}
    if "kind" not in words:
        return
    kinds = _names(words["kind"], "FindingKind") or _names(function, "FindingKind")
    written = {"CRITICAL"}
    if "severity" in words:
        written = _names(words["severity"], "Severity") or _names(function, "Severity")
    for kind in kinds:
        yield kind, written


@cache
def severities() -> dict[FindingKind, tuple[str, ...]]:
    found: defaultdict[FindingKind, set[str]] = defaultdict(set)
    for name, which in _raised():
        found[FindingKind[name]] |= {severity.lower() for severity in which}
    return {kind: tuple(s for s in ORDER if s in found[kind] | ELSEWHERE.get(kind, set())) for kind in FindingKind}


def facts(kind: FindingKind) -> str:
    """What the code knows of this kind, as the line below its heading."""
    topic = topic_of(Finding(kind, Severity.CRITICAL, "", 0.0))
    said = [", ".join(severities()[kind])]
    if topic != "findings" and "critical" in severities()[kind]:
        said.append(f"notice `{topic}`")
    judges = [f"[{d.name}](detection.md#{d.name})" for d in RULES if kind in d.kinds]
    if judges:
        said.append(", ".join(judges))
    if kind in RESTARTED:
        said.append("restarts training")
    return f"*{'; '.join(said)}*"


def skeleton(kind: FindingKind) -> str:
    return f"### {kind}\n\n{facts(kind)}\n\n{TODO}\n\n" + "".join(f"- **{part}**: {TODO}\n" for part in PARTS[1:])


def _texts(body: str) -> dict[str, str]:
    """The text of each part of an entry; a part that is missing has none."""
    meaning = FACTS.sub("", body, count=1).partition("\n- **")[0]
    found = {"meaning": "" if meaning.startswith("- **") else meaning}
    for part in PARTS[1:]:
        text = re.search(rf"^- \*\*{part}\*\*: (.*?)(?=^- \*\*|\Z)", body, re.MULTILINE | re.DOTALL)
        found[part] = text[1] if text else ""
    return found


def rendered(page: str) -> str:
    """The page with today's facts, and with a skeleton for each kind that it lacks."""

    def fresh(match: re.Match[str]) -> str:
        if match[1] not in set(FindingKind):
            return match[0]
        body = FACTS.sub("", match[2], count=1).lstrip("\n")
        return f"### {match[1]}\n\n{facts(FindingKind(match[1]))}\n\n{body}"

    page = ENTRY.sub(fresh, page)
    have = {name for name, _ in ENTRY.findall(page)}
    missing = [kind for kind in FindingKind if kind not in have]
    return page + "".join(f"\n{skeleton(kind)}" for kind in missing)


def problems(page: str) -> list[str]:
    """What is wrong with the page; empty if it is complete and as the code is."""
    entries = ENTRY.findall(page)
    names = [name for name, _ in entries]
    found = [f"{kind}: no entry" for kind in FindingKind if kind not in names]
    found += [f"{name}: two entries" for name in sorted({n for n in names if names.count(n) > 1})]
    found += [f"{name}: no such finding" for name in names if name not in set(FindingKind)]
    for name, body in entries:
        if name not in set(FindingKind):
            continue
        if facts(FindingKind(name)) not in body:
            found.append(f"{name}: its line of facts is not {facts(FindingKind(name))}")
        texts = _texts(body)
        found += [f"{name}: {part!r} is empty" for part in PARTS if TODO in texts[part] or len(texts[part].split()) < 2]
    codes = {int(code) for code in CODE_ROW.findall(page)}
    found += [f"exit code {int(code)}: no row" for code in ExitCode if int(code) not in codes]
    found += [f"exit code {code}: no such code" for code in sorted(codes - {int(code) for code in ExitCode})]
    return found


def screened(readme: str) -> str:
    """The README with today's screen."""
    screen = "".join(f"    {line}\n" if line else "\n" for line in SCREEN.read_text().splitlines())
    return SHOWN.sub(lambda match: f"{match[1]}{screen}\n", readme, count=1)


if __name__ == "__main__":
    README.write_text(screened(README.read_text()))
    PAGE.write_text(rendered(PAGE.read_text() if PAGE.exists() else "# Runbook\n"))
    left = problems(PAGE.read_text())
    print("\n".join(left) or "nothing is missing")
    sys.exit(bool(left))
