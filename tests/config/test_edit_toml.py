"""A few values of a TOML file change, and nothing else does."""

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.config.edit_toml import literal, set_values
from podwatch.domain.errors import ConfigurationError

COMMAND, CWD, ENV = ("trainer", "command"), ("trainer", "cwd"), ("trainer", "env")

text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)
comments = st.text(st.characters(whitelist_categories=["L", "N", "P", "S", "Zs"]), max_size=12)
words = st.lists(text, max_size=5)


@given(st.recursive(text | st.booleans() | st.integers(-9, 9), lambda i: st.lists(i) | st.dictionaries(text, i)))
def test_every_value_is_read_back(value: Any) -> None:
    assert tomllib.loads(f"x = {literal(value)}")["x"] == value


@st.composite
def files(draw: st.DrawFn) -> str:
    """A file with comments everywhere; command in one line, over several, with comments inside, or not at all."""
    command = draw(words)
    shape = draw(st.sampled_from(["", "line", "lines", "dotted"]))
    lines = [f"#{draw(comments)}", f'run_id = "r1" # {draw(comments)}']
    if shape == "dotted":
        lines += [f"trainer.command = {literal(command)}# {draw(comments)}", "[gpu] # cards", "poll = 2"]
        return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))
    lines += [f"[trainer] # {draw(comments)}"]
    if shape == "line":
        lines.append(f"  command  =  {literal(command)}   # {draw(comments)}")
    elif shape == "lines":
        inside = [f"  {literal(word)}, # {draw(comments)}" for word in command]
        lines += ["command = [ # first", *inside, f"# {draw(comments)}", "] # last"]
    lines += draw(st.sampled_from([[], [f"env = {literal({'A': 'x'})} # e"], ["", "[trainer.env]", 'A = "x" # e']]))
    lines += ["", "[[log_rules]]", 'name = "n" # one', "[[log_rules]]", 'pattern = """', "[trainer]", 'command = 1"""']
    return "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n\n"]))


@given(files(), words, text)
def test_what_was_asked_for_changes_and_every_comment_stays(before: str, command: list[str], cwd: str) -> None:
    changes: dict[tuple[str, ...], Any] = {COMMAND: tuple(command), CWD: cwd}
    try:
        after = set_values(before, changes)
    except ConfigurationError:
        assert "trainer.command" in before, "only a dotted key has no table that cwd could be put into"
        return
    wanted = tomllib.loads(before)
    wanted.setdefault("trainer", {}).update({"command": command, "cwd": cwd})
    assert tomllib.loads(after) == wanted
    for line in before.splitlines():
        if "#" in line and '"' not in line.partition("#")[2]:
            assert line.partition("#")[2].strip() in after
    untouched = [line for line in before.splitlines() if line and "command" not in line and "," not in line]
    assert [line for line in untouched if line not in after.splitlines() and not line.startswith(("#", "]"))] == []


@given(files(), st.dictionaries(st.sampled_from(["B", "C_D", "A"]), text, min_size=1))
def test_a_table_is_changed_where_it_is_written(before: str, env: dict[str, str]) -> None:
    now = tomllib.loads(before).get("trainer", {}).get("env", {})
    wanted = now | env
    try:
        after = set_values(before, {ENV: wanted})
    except ConfigurationError:
        assert "trainer.command" in before
        return
    assert tomllib.loads(after)["trainer"]["env"] == wanted
    assert after.count("#") == before.count("#") + sum(value.count("#") for value in env.values()) - sum(
        now[name].count("#") for name in env if name in now
    )


def test_windows_line_ends_stay() -> None:
    after = set_values('[trainer]\r\ncwd = "/x" # c\r\n', {CWD: "/y"})
    assert after == '[trainer]\r\ncwd = "/y" # c\r\n'


@pytest.mark.parametrize("before", ['trainer = { cwd = "/x" }\n', 'trainer.cwd = "/x"\n'])
def test_a_form_that_is_not_edited_is_refused_with_what_to_write(before: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        set_values(before, {COMMAND: ("a", "b")}, where="podwatch.toml")
    assert 'write trainer.command = ["a", "b"]' in str(caught.value)
