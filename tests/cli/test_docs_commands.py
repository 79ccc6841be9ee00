"""Every `podwatch` command in the pages that users copy from exists, with these options and arguments."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from podwatch.cli.root import cli

ROOT = Path(__file__).parents[2]
TEXTS = [*ROOT.glob("*.md"), ROOT / "systemd/README.md", *(ROOT / "docs").glob("*.md")]
PAGES = sorted(str(page.relative_to(ROOT)) for page in TEXTS if page.name != "CHANGELOG.md")
VALUES = {"N": "1", "PID": "1", "STEP": "1", "M": "1", "ID": "1"}
"""What stands for a number in a page."""
_CODE = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(r"(?:^|&& |/|sudo |until )podwatch (?=[-a-z])(.*)")
_PYTHON = re.compile(r"^```python.*?^```", re.M | re.S)


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """(the text, its words after "podwatch") of each command in code blocks and in backquotes."""
    for line in _PYTHON.sub("", page).splitlines():
        pieces = [line.strip()] if line.startswith("    ") else _CODE.findall(line)
        for piece in pieces:
            match = _COMMAND.search(piece.partition(" # ")[0])
            if match is not None:
                yield piece, words(match[1])


def words(text: str) -> list[str]:
    """The words of one command: up to the next one, or the gap before a description. Brackets mean "optional"."""
    command = re.split(r" {2,}|\.\.\.", text)[0].replace("[", " ").replace("]", " ")
    if command.count("'") % 2:
        command = command.rstrip("'")  # the end of bash -c '...'
    lexer = shlex.shlex(command, posix=True, punctuation_chars=";|&()<>")
    lexer.whitespace_split = True
    found: list[str] = []
    for word in lexer:
        if set(word) <= set(";|&()<>"):
            break
        found.append(VALUES.get(word, word))
    return found


def parse(arguments: list[str]) -> None:
    """Raises click.UsageError as the command line would, but not for what is missing: a page names commands, too."""
    group: click.Command = cli
    rest = list(arguments)
    context: click.Context | None = None
    try:
        while True:
            context = group.make_context("podwatch", rest, parent=context)
            if not isinstance(group, click.Group) or not context._protected_args:
                return
            _, found, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            assert found is not None
            group = found
    except (click.MissingParameter, click.exceptions.Exit):
        return
    except click.UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise


@pytest.mark.parametrize("page", PAGES)
def test_each_command_can_be_typed(page: str) -> None:
    wrong = []
    for text, arguments in commands((ROOT / page).read_text()):
        try:
            parse(arguments)
        except click.UsageError as error:
            wrong.append(f"{text}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)


def test_a_wrong_command_is_found() -> None:
    page = "`podwatch uninstal`:\n\n    x && /opt/bin/podwatch restart --stepp 3 | less\n    podwatch status  # yes\n"
    found = [arguments for _, arguments in commands(page)]
    assert found == [["uninstal"], ["restart", "--stepp", "3"], ["status"]]
    for arguments in found[:2]:
        with pytest.raises(click.UsageError):
            parse(arguments)
    parse(found[2])
