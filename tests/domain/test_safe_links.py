"""No link of a manifest that is accepted leads out after a restore, the kernel being asked."""

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from podwatch.domain import safe_links
from podwatch.domain.checkpoint import SymlinkEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_links import check_links, restorable

NAMES = ("a", "b", "sub", "é", "..x", "...")
names = st.sampled_from(NAMES)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
targets = st.lists(st.one_of(names, st.sampled_from(["..", "..", ".", ""])), min_size=1, max_size=5).map("/".join)


def file(path: str) -> str:
    return f"part/{path}"


def link(path: str, target: str) -> SymlinkEntry:
    return SymlinkEntry(path, "part", target)


def accepted(files: Sequence[str], links: Sequence[SymlinkEntry]) -> bool:
    try:
        check_links(files, links)
    except IntegrityError:
        return False
    return True


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    """Names that can lie beside each other: nothing below a file or a link."""
    entries: dict[str, str | None] = {}
    for path, target in draw(st.lists(st.tuples(paths, st.none() | targets), min_size=1, max_size=8)):
        folders = {path[:i] for i, c in enumerate(path) if c == "/"}
        if path not in entries and not folders & set(entries) and not any(e.startswith(f"{path}/") for e in entries):
            entries[path] = target
    files = [p for p, t in entries.items() if t is None]
    return files, {p: t for p, t in entries.items() if t}


@given(trees())
@example((["b/a/a"], {"a": "b/a/a/.."}))
def test_the_kernel_agrees(tree: tuple[list[str], dict[str, str]]) -> None:
    plain, targets = tree
    files, links = [file(p) for p in plain], [link(p, t) for p, t in targets.items()]
    fine = {x.path for x in links} - {p for p in targets if not accepted_alone(p, files, links)}
    root = Path(tempfile.mkdtemp())
    try:
        part = root / "below" / "part-that-no-target-names"
        part.mkdir(parents=True)
        for path in plain:
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).touch()
        for path, target in targets.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).symlink_to(target)
        for path in targets:
            try:
                found = os.open(part / path, os.O_PATH)  # os.path.realpath takes `file/..` for a directory
                real = str(Path(f"/proc/self/fd/{found}").readlink())
                os.close(found)
                inside = Path(real) == part or part in Path(real).parents
                assert inside or path not in fine, f"{path} -> {real}"
            except OSError as error:
                if error.errno != errno.ELOOP and path in fine:
                    real = os.path.realpath(part / path)
                    assert Path(real) == part or part in Path(real).parents, f"{path} dangles outside: {real}"
    finally:
        shutil.rmtree(root)


def accepted_alone(path: str, files: Sequence[str], links: Sequence[SymlinkEntry]) -> bool:
    """Is this link among those that can stay? (Another one being refused does not make it bad.)"""
    return path not in {x.path for x, _ in safe_links.refused_links(files, links)}


@given(trees())
def test_what_may_travel_is_accepted_by_every_restore(tree: tuple[list[str], dict[str, str]]) -> None:
    files, links = [file(p) for p in tree[0]], [link(p, t) for p, t in tree[1].items()]
    kept = restorable(files, links)
    assert accepted(files, kept)
    assert (kept == tuple(links)) == accepted(files, links)


OUT = {
    "through another link": {"a": "sub", "b": "a/../../x"},
    "up again behind another link": {"d/e/x": "../..", "d/e/out": "x/../y"},
    "a link to a link's directory": {"deep/up": "..", "out": "deep/up/../../x"},
    "a chain": {"l1": "l2", "l2": "l3", "l3": "sub/../../x"},
    "a link in a directory that a link names": {"sub/up": "../..", "way": "sub/up"},
    "absolute": {"a": "/etc/passwd"},
    "absolute, at the end of a chain": {"a": "b", "b": "/etc"},
    "up and up": {"a": "..", },
    "empty and dot segments": {"a": ".//./..//."},
    "back from what is not known": {"a": "nowhere/../sub"},
    "back from a file": {"a": "file/../sub"},
    "empty": {"a": ""},
    "back through a name with a dot look-alike": {"a": "sub/．．/../../../x"},
    "twice as long with each": {f"l{n}": f"l{n + 1}/../l{n + 1}" for n in range(39)} | {"l39": "sub"},
}  # fmt: skip


@pytest.mark.parametrize("name", OUT)
def test_it_is_refused(name: str) -> None:
    files = [file("sub/x"), file("deep/y"), file("file")]
    links = [link(p, t) for p, t in OUT[name].items()]
    assert not accepted(files, links)
    assert accepted(files, restorable(files, links))


INSIDE = {
    "a file": {"a": "file"}, "a directory": {"a": "sub"}, "through a link": {"a": "sub", "b": "a/x"},
    "back inside": {"sub/a": "../file"}, "a chain": {"a": "b", "b": "./c/", "c": "sub//x"},
    "dangling": {"a": "not-sent.tmp"}, "the part itself": {"sub/a": ".."},
    "a loop, which dangles": {"a": "b/x", "b": "a/y"},
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_it_is_fine(name: str) -> None:
    assert accepted([file("sub/x"), file("file")], [link(p, t) for p, t in INSIDE[name].items()])


def test_nothing_lies_below_a_link() -> None:
    assert not accepted([file("a/x")], [link("a", "sub")])
    assert not accepted([], [link("a/x", "y"), link("a", "sub")])


def test_a_hostile_number_of_links_costs_little() -> None:
    many = [link(f"d/l{n}", "/".join(["..", "d"] * 180)) for n in range(10_001)]
    assert not accepted([], many)
