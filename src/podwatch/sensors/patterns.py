"""Which text a regular expression requires and how much time it can take, read from its parse tree. Pure.

Python's ``re`` cannot be interrupted and holds the interpreter while it runs: one bad pattern on one long line would
stop the whole daemon, including its watchdog. So a pattern that could take exponential time is recognized before it
runs.
"""

import importlib
import re
from collections.abc import Iterable
from typing import Any

MANY = 200
"""A repeat of more than this many counts as unbounded; a shorter one is a constant factor."""
NESTED = 16
"""The same for a repeat inside a repeat, where the factors multiply."""
MAX_DEGREE = 2
"""Unbounded repeats in sequence: with the search's own start position that is the third power of the line's length, at
worst a second for the 1,000 characters that are matched."""
LITERAL = 3
"""Minimum length: shorter fixed text is in nearly every line and saves nothing."""


def risky(pattern: str) -> bool:
    """Whether the pattern could take more than about a second on a line. True also where that is unknown."""
    try:
        parser = importlib.import_module("re._parser")
        return _degree(parser.parse(pattern)) > MAX_DEGREE
    except (ImportError, AttributeError, ValueError, TypeError, KeyError, RecursionError, re.error):
        return True


class _Endless(ValueError):  # noqa: N818
    """The pattern takes exponential time, or its cost is unknown."""


def _degree(tree: Iterable[tuple[Any, Any]]) -> int:
    total = 0
    for operation, value in tree:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, most, body = value
            inner = _degree(body)
            if int(most) > NESTED and (inner or _ambiguous(body)):
                raise _Endless("a repeat inside a repeat")
            total += inner + (int(most) > MANY)
        elif name == "BRANCH":
            total += max(_degree(branch) for branch in value[1])
        elif name == "SUBPATTERN":
            total += _degree(value[3])
        elif name in ("ASSERT", "ASSERT_NOT"):
            total += _degree(value[1])
        elif name == "ATOMIC_GROUP":
            total += _degree(value)
        elif name not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "CATEGORY"):
            raise _Endless(name)  # a reference back, a condition
    return total


def _ambiguous(tree: Iterable[tuple[Any, Any]]) -> bool:
    """Whether it can match the same text in more than one way. Repeated, the time then doubles with every character."""
    for operation, value in tree:
        name = str(operation)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            if value[0] != value[1] or _ambiguous(value[2]):
                return True
        elif name == "BRANCH" or (name == "SUBPATTERN" and _ambiguous(value[3])):
            return True
    return False


def literals(pattern: str) -> tuple[bytes, ...]:
    """Fixed texts of which every match contains at least one, lower-case where the pattern ignores case (see
    ``folds``). Empty where none is long enough."""
    try:
        parser = importlib.import_module("re._parser")
        tree = parser.parse(pattern)
        found = _best(tree)
    except (ImportError, AttributeError, ValueError, TypeError, RecursionError, re.error):
        return ()
    if folds(pattern):
        found = frozenset(text.lower() for text in found)
    return tuple(sorted(text.encode() for text in found))


def folds(pattern: str) -> bool:
    """Whether the pattern or a part of it ignores case."""
    return re.compile(pattern).flags & re.IGNORECASE != 0 or re.search(r"\(\?[a-zA-Z]*i", pattern) is not None


def _best(tree: Iterable[tuple[Any, Any]]) -> frozenset[str]:
    """The candidate whose shortest text is the longest."""
    candidates: list[frozenset[str]] = []
    run = ""
    for operation, value in tree:
        name = str(operation)
        character = chr(value) if name == "LITERAL" else ""
        # JSON escapes these characters, so they cannot be searched in the raw bytes.
        if character and character.isascii() and character.isprintable() and character not in '"\\/':
            run += character
            continue
        candidates.append(frozenset({run}))
        run = ""
        if name == "SUBPATTERN":
            candidates.append(_best(value[3]))
        elif name == "BRANCH":
            branches = [_best(branch) for branch in value[1]]
            candidates.append(frozenset().union(*branches) if all(branches) else frozenset())
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and value[0] >= 1:
            candidates.append(_best(value[2]))
    candidates.append(frozenset({run}))
    good = [c for c in candidates if c and min(map(len, c)) >= LITERAL]
    return max(good, key=lambda c: min(map(len, c)), default=frozenset())
