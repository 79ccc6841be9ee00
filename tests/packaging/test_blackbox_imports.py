"""tests/blackbox and what it uses know podwatch from outside only: they survive each rewrite of its inside."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imported(file: Path) -> set[str]:
    """Every module that a file names in an import, wherever it does; each name of ``from x import y`` may be one."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def files_of(module: str) -> Iterator[Path]:
    """The module, and the packages that its import runs."""
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:count])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def used_by(files: list[Path]) -> set[Path]:
    """With every module of the tests that they import, and so on."""
    found, waiting = set(files), list(files)
    while waiting:
        modules = {module for module in imported(waiting.pop()) if module.partition(".")[0] == "tests"}
        new = {file for module in modules for file in files_of(module)} - found
        found |= new
        waiting += new
    return found


def test_black_box_tests_import_nothing_of_podwatch() -> None:
    """Nor does the process import it that pretends to be a trainer."""
    support = [ROOT / f"tests/support/{name}.py" for name in ("rig", "asking", "fake_trainer")]
    inside = {}
    for file in used_by([*(ROOT / "tests/blackbox").glob("**/*.py"), *support]):
        inside[str(file.relative_to(ROOT))] = sorted(m for m in imported(file) if m.partition(".")[0] == "podwatch")
    assert {file: modules for file, modules in inside.items() if modules} == {}
    assert "tests/support/processes.py" in inside, "what the support imports is looked at, too"
