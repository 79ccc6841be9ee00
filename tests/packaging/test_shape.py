"""The shape that docs/architecture.md promises, measured: sizes of files, constructors and functions, and no class that
is cut into files by inheritance.

    python -m tests.packaging.test_shape     # lists what misses each limit
"""

import ast
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "podwatch"

MOST_FILES = 427
MOST_PARAMETERS = 10
MOST_LINES = 80
MOST_BRANCHES = 20
MOST_CALLABLES = 100

LONGER: dict[str, str] = {}
"""Functions beyond a limit: ``module:name`` and the reason."""

_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.comprehension)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    nodes: tuple[ast.AST, ...]


@cache
def modules() -> tuple[Module, ...]:
    gc.disable()  # hundreds of thousands of nodes, of which each lives until the end
    try:
        return tuple(
            Module(str(path.relative_to(SOURCE)), tuple(ast.walk(ast.parse(path.read_text()))))
            for path in sorted(SOURCE.rglob("*.py"))
        )
    finally:
        gc.freeze()
        gc.enable()


def functions() -> Iterator[tuple[str, Function]]:
    for module in modules():
        for node in module.nodes:
            if isinstance(node, Function):
                yield f"{module.name}:{node.name}", node


def parameters(function: Function) -> list[ast.arg]:
    found = function.args
    return [a for a in (*found.posonlyargs, *found.args, *found.kwonlyargs) if a.arg not in ("self", "cls")]


def branches(function: Function) -> int:
    """Branches of the function itself: those of functions inside it are theirs."""
    count, left = 0, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if not isinstance(node, Function):
            count += isinstance(node, _BRANCHES)
            left.extend(ast.iter_child_nodes(node))
    return count


def wide_constructors() -> list[str]:
    return [
        f"{place} at line {node.lineno} has {len(parameters(node))}"
        for place, node in functions()
        if node.name == "__init__" and len(parameters(node)) > MOST_PARAMETERS
    ]


def long_functions() -> list[str]:
    found = []
    for place, node in functions():
        lines, count = (node.end_lineno or node.lineno) - node.lineno + 1, branches(node)
        if (lines > MOST_LINES or count > MOST_BRANCHES) and place not in LONGER:
            found.append(f"{place} at line {node.lineno} has {lines} lines and {count} branches")
    return found


def callables() -> Counter[str]:
    """``Callable[`` in the signatures and fields of each file."""
    count: Counter[str] = Counter()
    for module in modules():
        for node in module.nodes:
            annotations: list[ast.expr | None] = []
            if isinstance(node, Function):
                annotations = [*(a.annotation for a in parameters(node)), node.returns]
            elif isinstance(node, ast.ClassDef):
                annotations = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
            for annotation in annotations:
                for part in ast.walk(annotation) if annotation is not None else ():
                    if isinstance(part, ast.Subscript) and ast.unparse(part.value).endswith("Callable"):
                        count[module.name] += 1
    return count


def ladders() -> list[str]:
    """Classes with behaviour in another file than their only subclass: one object, cut in two."""
    below: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    defined: dict[tuple[str, str], ast.ClassDef] = {}
    for module in modules():
        imported = {
            alias.asname or alias.name: (f"{node.module}", alias.name)
            for node in module.nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        here = "podwatch." + module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                defined[here, node.name] = node
                for base in node.bases:
                    name = ast.unparse(base).split("[")[0]
                    below[imported.get(name, (here, name))].append(f"{here}.{node.name}")
    found = []
    for (where, base), names in below.items():
        node = defined.get((where, base))
        if node is None or len(names) != 1 or names[0].rpartition(".")[0] == where:
            continue
        kinds = {ast.unparse(b).split("[")[0].rpartition(".")[2] for b in node.bases}
        if kinds & {"Protocol", "ABC", "NamedTuple", "TypedDict", "BaseModel"} or base.endswith("Error"):
            continue
        if any(isinstance(part, Function) for part in node.body):
            found.append(f"{names[0]} is the only {where}.{base}")
    return found


def test_constructors_take_few_parameters() -> None:
    assert not wide_constructors()


def test_functions_fit_on_a_screen() -> None:
    assert not long_functions()


def test_callables_are_the_exception() -> None:
    assert sum(callables().values()) < MOST_CALLABLES


def test_no_class_is_cut_into_files() -> None:
    assert not ladders()


def test_a_listing_of_the_files_can_be_read() -> None:
    assert len(modules()) <= MOST_FILES


if __name__ == "__main__":
    print(len(modules()), "files")
    print("\n".join((*wide_constructors(), *long_functions(), *ladders())))
    print(sum(callables().values()), "callables:", *(f"{n} {name}" for name, n in callables().most_common()), sep="\n")
