"""``tools/size``: squeezed code counts as what it would be, and comments and docstrings stand apart."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tools import size

PLAIN = '''"""Room."""

LIMIT = 3
"""How many."""


class Part:
    """One part."""

    # why
    def first(self, items: list[int]) -> int:  # beside code
        text = """
# not a comment

"""
        return items[0] + len(text)
'''
SQUEEZED = """def squeezed(a, b):
    rows = [
        ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 1, 2], ["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", 1, 2], ["c", 1, 2],
    ]  # noqa: E501  # fmt: skip
    # fmt: off
    if a: rows.append(b); rows.append(a)
    # fmt: on
    return rows
"""
SPREAD = """def squeezed(a, b):
    rows = [
        ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 1, 2],
        ["bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb", 1, 2],
        ["c", 1, 2],
    ]  # noqa: E501
    if a:
        rows.append(b)
        rows.append(a)
    return rows
"""
TREE = {
    "src/podwatch/__init__.py": b"",
    "src/podwatch/room/part.py": PLAIN.encode(),
    "src/podwatch/room/page.html": b"<p>\n</p>\n",
    "src/podwatch/room/logo.png": b"\x89PNG\0",
    "src/podwatch/other/deep/part.py": b"class Part:\n    class Inner:\n        pass\n",
    "tests/conftest.py": b"x = 1\n",
    "tests/packaging/test_size.py": SQUEEZED.encode(),
}
RUFF = size.formatter()
needs_ruff = pytest.mark.skipif(RUFF is None, reason="ruff is not installed (make lint)")


def test_comments_and_docstrings_stand_apart() -> None:
    found = size.measured("part.py", PLAIN, PLAIN)
    assert (found.lines, found.docs, found.comments, found.blank, found.code) == (16, 3, 1, 4, 8)
    assert (found.statements, found.constants) == (5, 1)
    assert [(f.name, f.lines) for f in found.functions] == [("Part.first", 6)]


def test_what_looks_like_a_comment_in_a_docstring_is_none() -> None:
    text = '"""Doc.\n\n# text\n"""\n'
    assert size.measured("a.py", text, text).docs == 4


def test_the_rooms_their_data_and_the_sums() -> None:
    found = size.report(TREE, None)
    source, tests = found.areas["src/podwatch"], found.areas["tests"]
    assert list(source.rooms) == ["(top)", "other", "room"]
    room = source.rooms["room"]
    assert (room.files, room.lines, room.data_files, room.data_lines, room.data_bytes) == (1, 16, 2, 2, 14)
    assert (source.data, source.binary) == (
        {"src/podwatch/room/page.html": 2},
        {"src/podwatch/room/logo.png": 5},
    )
    assert (source.sum.files, source.sum.lines) == (3, 19)
    assert (tests.rooms["(top)"].lines, tests.rooms["packaging"].unformatted) == (1, 6)
    assert found.problems == ["ruff is not installed (make lint): plain lines, not formatted ones"]


def test_class_names_that_exist_twice_and_long_functions() -> None:
    found = size.report(TREE, None)
    assert found.repeated_classes == {"Part": ["src/podwatch/other/deep/part.py", "src/podwatch/room/part.py"]}
    assert found.longest_functions == [(6, "Part.first", "src/podwatch/room/part.py:11")]


def test_a_pragma_is_taken_out_of_the_comment_that_holds_it() -> None:
    assert size.without_pragmas("x = 1  # fmt: skip\n") == "x = 1\n"
    assert size.without_pragmas("x = 1  # noqa: E501  # fmt: skip\n") == "x = 1  # noqa: E501\n"
    assert size.without_pragmas("# fmt: off\nx = 1\n# yapf: enable\n") == "x = 1\n"
    assert size.without_pragmas('x = "# fmt: skip"\n') == 'x = "# fmt: skip"\n'


def test_lines_that_the_formatter_leaves_alone() -> None:
    assert size.unformatted_lines(SQUEEZED) == 6
    assert size.unformatted_lines("# fmt: off\nx = 1\ny = 2\n") == 3
    assert size.unformatted_lines('x = "# fmt: skip"\n') == 0


@needs_ruff
def test_a_squeezed_file_counts_as_its_formatted_form() -> None:
    found = size.report(TREE, RUFF)
    assert found.areas["tests"].rooms["packaging"].lines == len(SPREAD.splitlines())
    assert size.formatted({"a.py": SQUEEZED}, str(RUFF)) == ({"a.py": SPREAD}, "")


@needs_ruff
def test_a_file_that_is_not_python_is_counted_and_named() -> None:
    found = size.report({"src/podwatch/a.py": b"x = (\n", "src/podwatch/b.py": b"x = 1 ; y = 2\n"}, RUFF)
    assert found.areas["src/podwatch"].sum.lines == 1 + 2
    assert any("a.py" in problem for problem in found.problems)


def test_the_text_and_the_json_have_the_same_sums() -> None:
    found = size.report(TREE, None)
    text = size.as_text(found, short=True)
    assert [line.split()[1:3] for line in text.splitlines() if line.startswith("sum")] == [["3", "19"], ["2", "9"]]
    assert "longest" not in text
    assert "Part.first" in size.as_text(found, short=False)
    assert json.loads(json.dumps(asdict(found)))["areas"]["tests"]["sum"]["lines"] == 9


def test_a_revision_and_the_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    for path, content in TREE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    new = tmp_path / "src/podwatch/room/new.py"
    new.write_text("x = 1\n")
    assert size.files_of_revision(tmp_path, "HEAD") == TREE
    assert size.files_of_checkout(tmp_path) == {**TREE, "src/podwatch/room/new.py": b"x = 1\n"}


def test_the_command_runs() -> None:
    command = [sys.executable, str(size.ROOT / "tools" / "size"), "--help"]
    assert "unformatted" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
