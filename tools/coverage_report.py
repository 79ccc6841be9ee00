"""Combine what ``coverage-outside`` measured, and write what the outside tests reach and what they do not.

    python tools/coverage_report.py SETTINGS DATA TREE REPORT NOTE      (in .venv-coverage)

A line counts as covered if a process of podwatch executed it; what only the tests' own process executed is counted
beside it. A function is reached if a line of its body was executed: importing a module executes its ``def`` lines.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path("src/podwatch")


@dataclass(slots=True)
class File:
    """``covered``: by processes of podwatch; ``tests_only``: by the process of the tests alone."""

    path: Path
    lines: set[int]
    covered: set[int]
    tests_only: set[int]
    unreached: list[str] = field(default_factory=list)
    functions: int = 0

    @property
    def room(self) -> str:
        parts = self.path.relative_to(SOURCE).parts
        return parts[0] if len(parts) > 1 else "(top)"


def functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, int, int]]:
    """Qualified name, first and last line of the body of each function."""
    for child in ast.iter_child_nodes(node):
        name = f"{outer}{child.name}." if hasattr(child, "name") and hasattr(child, "body") and child.name else outer
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name.rstrip("."), child.body[0].lineno, child.end_lineno or child.lineno
        yield from functions(child, name)


def measured(coverage: Any, tree: Path) -> list[File]:
    """Every file of the source, also those that no process imported."""
    found = []
    for path in sorted((tree / SOURCE).rglob("*.py")):
        lines = set(coverage.analysis2(str(path))[1])
        by = {context: lines & reached(coverage, path, context) for context in ("product", "tests")}
        file = File(path.relative_to(tree), lines, by["product"], by["tests"] - by["product"])
        for name, first, last in functions(ast.parse(path.read_text())):
            body = {line for line in lines if first <= line <= last}
            file.functions += bool(body)
            if body and not body & file.covered:
                file.unreached.append(f"{name} ({len(body)} lines, line {first})")
        found.append(file)
    return found


def reached(coverage: Any, path: Path, context: str) -> set[int]:
    data = coverage.get_data()
    data.set_query_context(context)
    return set(data.lines(str(path)) or ())


def text(files: list[File], note: str) -> str:
    rooms: dict[str, list[File]] = defaultdict(list)
    for file in files:
        rooms[file.room].append(file)
    head = ("lines", "covered", "share", "tests only", "functions", "unreached")
    out = [note, "", f"{'src/podwatch':16}" + "".join(f"{name:>12}" for name in head)]
    out += [row(room, found) for room, found in sorted(rooms.items())] + [row("sum", files)]
    nothing = [file for file in files if file.lines and not file.covered]
    out += ["", f"files that no process of podwatch reaches: {len(nothing)}"]
    out += [f"  {file.path} ({len(file.lines)} lines)" for file in nothing]
    out += ["", "functions that no process of podwatch reaches, in the other files"]
    for file in files:
        if file.unreached and file not in nothing:
            out += [f"  {file.path}", *(f"      {name}" for name in file.unreached)]
    return "\n".join(out) + "\n"


def row(name: str, files: list[File]) -> str:
    lines, covered = sum(len(f.lines) for f in files), sum(len(f.covered) for f in files)
    more = (
        sum(len(f.tests_only) for f in files),
        sum(f.functions for f in files),
        sum(len(f.unreached) for f in files),
    )
    share = f"{covered / lines:.0%}" if lines else "-"
    return f"{name:16}" + "".join(f"{cell:>12}" for cell in (lines, covered, share, *more))


def main() -> None:
    from coverage import Coverage

    settings, data, tree, report, note = sys.argv[1:]
    coverage = Coverage(config_file=settings)
    parts = [str(path) for path in Path(data).glob("part.*")]
    coverage.combine(parts, keep=True)
    found = text(measured(coverage, Path(tree)), f"{note}; {len(parts)} processes measured")
    Path(report).write_text(found)
    print(found.partition("\nfiles that")[0], f"the whole report: {report}", sep="\n")


if __name__ == "__main__":
    main()
