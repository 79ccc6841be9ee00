"""Measure the source and the tests of this repository, or of one of its revisions.

    tools/size [--json | --short] [REVISION]

"Lines" are those of the formatter, blank ones included: a copy without `# fmt:` comments is formatted with the
settings of this checkout (also a revision's), so that squeezed code counts as what it would be. Columns:

    lines        formatted lines = comments + docs + code + blank
    comments     lines that hold only a comment
    docs         docstrings, those of attributes included
    share        of comments and docs in the lines
    statements   statements of the syntax tree, docstrings left out
    constants    names in capitals that a module assigns
    unformatted  lines that the formatter leaves alone in the files as they are (fmt: skip, fmt: off)
    data         lines of the files that are text but not Python, and the bytes of all files that are not Python

There is no limit: the program reports. Nothing is written into the checkout.
"""

import argparse
import ast
import gc
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("src/podwatch", "tests")
LONGEST = 15

PRAGMA = re.compile(r"#\s*(?:fmt:\s*(skip|off|on)|yapf:\s*(disable|enable))\b[^#]*")
"""What makes the formatter leave code alone."""
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]+")
LAYOUT_TOKENS = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

Files = dict[str, bytes]
"""Path below the root of the repository, and content."""


# -- which files ------------------------------------------------------------------------------------------------------


def files_of_checkout(root: Path) -> Files:
    """The files that git tracks or would add, as they are on the disk."""
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *AREAS)
    paths = [root / name for name in listed.decode().split("\0") if name]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths if p.is_file() and not p.is_symlink()}


def files_of_revision(root: Path, revision: str) -> Files:
    """The files of a commit."""
    archive = _git(root, "archive", "--format=tar", revision, "--", *AREAS)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [(member.name, tar.extractfile(member)) for member in tar if member.isfile()]
        return {name: file.read() for name, file in members if file is not None}


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"tools/size: git {arguments[0]}: {done.stderr.decode().strip()}")
    return done.stdout


# -- the formatter ----------------------------------------------------------------------------------------------------


def formatter() -> str | None:
    """The path of ruff: beside this Python, in .venv, or on PATH."""
    places = [str(Path(sys.executable).parent), str(ROOT / ".venv" / "bin"), os.environ.get("PATH", "")]
    return shutil.which("ruff", path=os.pathsep.join(places))


def formatted(sources: dict[str, str], ruff: str) -> tuple[dict[str, str], str]:
    """The sources as ruff formats them without their pragmas, and what it complained about."""
    with tempfile.TemporaryDirectory(prefix="podwatch-size-") as scratch:
        for path, text in sources.items():
            file = Path(scratch, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(without_pragmas(text))
        command = [
            ruff,
            "format",
            "--no-cache",
            "--quiet",
            "--no-force-exclude",
            "--config",
            str(ROOT / "pyproject.toml"),
        ]
        done = subprocess.run([*command, *sources], cwd=scratch, check=False, capture_output=True, text=True)
        return {path: Path(scratch, path).read_text() for path in sources}, done.stderr.strip()


def without_pragmas(text: str) -> str:
    """The source without the comments that switch the formatter off."""
    if not PRAGMA.search(text):
        return text
    lines = text.splitlines(keepends=True)
    for row, column, comment in reversed(pragmas(text)):
        before = lines[row - 1][:column]
        kept = (before + PRAGMA.sub("", comment)).rstrip()
        lines[row - 1] = f"{kept}\n" if kept else ""
    return "".join(lines)


def pragmas(text: str) -> list[tuple[int, int, str]]:
    """Row, column and text of each comment that holds a pragma."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [(*t.start, t.string) for t in tokens if t.type == tokenize.COMMENT and PRAGMA.search(t.string)]


def unformatted_lines(text: str) -> int:
    """How many lines a pragma keeps from the formatter."""
    if not PRAGMA.search(text):
        return 0
    starts = sorted({node.lineno for _, node in statements(ast.parse(text))})
    rows: set[int] = set()
    off = 0
    for row, _, comment in pragmas(text):
        found = PRAGMA.search(comment)
        match found and (found[1] or found[2]):
            case "skip":
                rows.update(range(max((s for s in starts if s <= row), default=row), row + 1))
            case "off" | "disable":
                off = off or row
            case _:
                rows.update(range(off, row + 1) if off else ())
                off = 0
    rows.update(range(off, text.count("\n") + 1) if off else ())
    return len(rows)


# -- one Python file --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Function:
    lines: int
    name: str


@dataclass(slots=True)
class Source:
    """One Python file. ``functions`` and ``classes`` have qualified names."""

    path: str
    lines: int = 0
    comments: int = 0
    docs: int = 0
    code: int = 0
    blank: int = 0
    statements: int = 0
    constants: int = 0
    unformatted: int = 0
    functions: list[Function] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    problem: str = ""


def measured(path: str, text: str, original: str) -> Source:
    """The size of one file, given as formatted and as it is."""
    source = Source(path, lines=len(text.splitlines()))
    try:
        tree = ast.parse(text)
        source.unformatted = unformatted_lines(original)
    except SyntaxError as error:
        source.code, source.problem = source.lines, f"{path}: not Python: {error.msg}"
        return source
    found = list(statements(tree))
    docs = [node for _, node in found if _is_docstring(node)]
    _count_lines(source, text, {row for node in docs for row in range(node.lineno, (node.end_lineno or 0) + 1)})
    source.statements = len(found) - len(docs)
    source.constants = sum(1 for node in tree.body for _ in _constants(node))
    for name, node in found:
        if isinstance(node, ast.ClassDef):
            source.classes.append(name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            source.functions.append(Function((node.end_lineno or node.lineno) - node.lineno + 1, name))
    return source


def statements(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Every statement below ``node``, with the qualified name that it defines (empty if it defines none)."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            name = getattr(child, "name", None) if isinstance(child, DEFINITIONS) else None
            inner = f"{outer}.{name}".lstrip(".") if name else ""
            if isinstance(child, ast.stmt):
                yield inner, child
            yield from statements(child, inner or outer)


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _count_lines(source: Source, text: str, docs: set[int]) -> None:
    rows = {row: line.strip() for row, line in enumerate(text.splitlines(), 1) if row not in docs}
    if any('"""' in line or "'''" in line for line in rows.values()):  # what looks like a comment can be text
        code = _rows_of_code(text) - docs
    else:
        code = {row for row, line in rows.items() if line and not line.startswith("#")}
    source.docs = len(docs)
    source.code = len(code)
    source.blank = sum(1 for row, line in rows.items() if not line and row not in code)
    source.comments = source.lines - source.docs - source.code - source.blank


def _rows_of_code(text: str) -> set[int]:
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in LAYOUT_TOKENS]
    return {row for token in tokens for row in range(token.start[0], token.end[0] + 1)}


def _is_docstring(node: ast.stmt) -> bool:
    """Whether this is a string that stands alone: a docstring, also one of an attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _constants(node: ast.stmt) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        for name in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(name, ast.Name) and CONSTANT.fullmatch(name.id):
                yield name.id


# -- the report -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Room:
    """The files of one folder. ``share`` is that of comments and docstrings."""

    files: int = 0
    lines: int = 0
    comments: int = 0
    docs: int = 0
    share: float = 0.0
    code: int = 0
    blank: int = 0
    statements: int = 0
    constants: int = 0
    unformatted: int = 0
    data_files: int = 0
    data_lines: int = 0
    data_bytes: int = 0

    def add(self, other: "Room | Source") -> None:
        for name in Room.__slots__:
            if name != "share":
                setattr(self, name, getattr(self, name) + getattr(other, name, 0))
        self.share = round((self.comments + self.docs) / self.lines, 3) if self.lines else 0.0


@dataclass(frozen=True, slots=True)
class Area:
    """Source or tests. ``data``: lines of each text file that is not Python; ``binary``: bytes of each other file."""

    rooms: dict[str, Room]
    sum: Room
    data: dict[str, int]
    binary: dict[str, int]


@dataclass(frozen=True, slots=True)
class Report:
    """``formatter`` is empty where lines are plain ones. ``longest_functions`` (lines, name, place) and
    ``repeated_classes`` (name, places) are those of the source."""

    revision: str
    formatter: str
    problems: list[str]
    areas: dict[str, Area]
    longest_functions: list[tuple[int, str, str]]
    repeated_classes: dict[str, list[str]]


def report(files: Files, ruff: str | None, revision: str = "") -> Report:
    """Measure these files; without ruff their lines as they are."""
    originals = {path: content.decode() for path, content in sorted(files.items()) if path.endswith(".py")}
    texts, problem, version = originals, "ruff is not installed (make lint): plain lines, not formatted ones", ""
    if ruff:
        texts, problem = formatted(originals, ruff)
        version = subprocess.run([ruff, "--version"], check=False, capture_output=True, text=True).stdout.strip()
    sources = measure_all([(path, texts[path], originals[path]) for path in originals])
    product = [source for source in sources if source.path.startswith(AREAS[0])]
    return Report(
        revision,
        version,
        [*filter(None, [problem]), *(source.problem for source in sources if source.problem)],
        {area: area_of(area, sources, files) for area in AREAS},
        longest_functions(product, originals),
        repeated_classes(product),
    )


def measure_all(work: list[tuple[str, str, str]]) -> list[Source]:
    if len(work) < 100:
        return [measured(*one) for one in work]
    with ProcessPoolExecutor(initializer=gc.disable) as pool:
        return list(pool.map(measured, *zip(*work, strict=True), chunksize=16))


def area_of(area: str, sources: Iterable[Source], files: Files) -> Area:
    rooms: dict[str, Room] = {}
    data: dict[str, int] = {}
    binary: dict[str, int] = {}
    for source in sources:
        if source.path.startswith(f"{area}/"):
            room = rooms.setdefault(room_of(area, source.path), Room())
            room.files += 1
            room.add(source)
    for path, content in sorted(files.items()):
        if path.startswith(f"{area}/") and not path.endswith(".py"):
            lines = text_lines(content)
            room = rooms.setdefault(room_of(area, path), Room())
            room.data_files += 1
            room.data_lines += lines or 0
            room.data_bytes += len(content)
            (binary if lines is None else data)[path] = len(content) if lines is None else lines
    total = Room()
    for room in rooms.values():
        total.add(room)
    return Area(dict(sorted(rooms.items())), total, data, binary)


def room_of(area: str, path: str) -> str:
    """The first folder below the area."""
    parts = PurePosixPath(path).relative_to(area).parts
    return parts[0] if len(parts) > 1 else "(top)"


def text_lines(content: bytes) -> int | None:
    """The lines of a text; None if the file is binary."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else len(text.splitlines())


def longest_functions(sources: Iterable[Source], originals: dict[str, str]) -> list[tuple[int, str, str]]:
    """Formatted lines, qualified name and place of the longest functions, longest first."""
    found = [(function.lines, function.name, source.path) for source in sources for function in source.functions]
    found.sort(key=lambda one: (-one[0], one[2], one[1]))
    return [(lines, name, f"{path}:{_line_of(originals[path], name)}") for lines, name, path in found[:LONGEST]]


def _line_of(text: str, name: str) -> int:
    return next((node.lineno for found, node in statements(ast.parse(text)) if found == name), 0)


def repeated_classes(sources: Iterable[Source]) -> dict[str, list[str]]:
    """The class names that exist more than once, with their files."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for name in source.classes:
            places.setdefault(name.rpartition(".")[2], []).append(source.path)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


# -- as text ----------------------------------------------------------------------------------------------------------

HEAD = ("files", "lines", "comments", "docs", "share", "code", "statements", "constants", "unformatted", "data", "kB")


def as_text(found: Report, *, short: bool) -> str:
    of = f" of {found.revision}" if found.revision else ""
    how = f": lines as {found.formatter} leaves them, without fmt comments" if found.formatter else ""
    parts = [f"size{of}{how}", *found.problems]
    for name, area in found.areas.items():
        parts += ["", *table(name, area)]
    if not short:
        parts += ["", *details(found)]
    return "\n".join(parts)


def table(name: str, area: Area) -> list[str]:
    """One line for each room, and the sum."""
    rows = [(name, *HEAD), *(_row(room, size) for room, size in area.rooms.items()), _row("sum", area.sum)]
    return [
        f"{first:16}" + "".join(f"{cell:>{len(head) + 3}}" for cell, head in zip(rest, HEAD, strict=True))
        for first, *rest in rows
    ]


def _row(name: str, size: Room) -> tuple[str, ...]:
    numbers = (size.files, size.lines, size.comments, size.docs, f"{size.share:.0%}", size.code, size.statements)
    more = (size.constants, size.unformatted, size.data_lines, round(size.data_bytes / 1000))
    return name, *map(str, (*numbers, *more))


def details(found: Report) -> list[str]:
    source = AREAS[0]
    lines = [f"longest functions of {source} (lines, name, place)"]
    lines += [f"{count:6}  {name}  {place}" for count, name, place in found.longest_functions]
    lines += ["", f"class names of {source} that exist more than once: {len(found.repeated_classes)}"]
    for name, places in found.repeated_classes.items():
        lines.append(f"  {name}: {', '.join(place.removeprefix(f'{source}/') for place in places)}")
    for name, area in found.areas.items():
        lines += ["", f"binary files of {name}: {len(area.binary)}, {sum(area.binary.values()):,} bytes; the largest"]
        largest = sorted(area.binary.items(), key=lambda one: -one[1])[:LONGEST]
        lines += [f"{size:10}  {path}" for path, size in largest]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    parser.add_argument("--short", action="store_true", help="only the rooms and their sums")
    parser.add_argument("revision", nargs="?", default="", help="a revision of git; default: the checkout")
    given = parser.parse_args()
    files = files_of_revision(ROOT, given.revision) if given.revision else files_of_checkout(ROOT)
    found = report(files, formatter(), given.revision)
    print(json.dumps(asdict(found), indent=1) if given.json else as_text(found, short=given.short))
