"""The commands in the text of a shell script, as far as they can be read without running it. Pure.

Quotes, comments, redirections, ``cd`` and the script's own arguments are understood; variables and substitutions stay
as they are written, because their values are unknown. The time is linear in the length of the text.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_DOUBLE = r'"(?:[^"\\]|\\.)*"'
_WORD = rf"(?:[^\s;&|()<>'\"\\]+|\\.|'[^']*'|{_DOUBLE})+"
_TOKEN = re.compile(
    rf"[^\S\n]+|\#[^\n]*"
    rf"|(?:\d*(?:&>>?|>>?|<<<|<)(?:&[ ]*[\w-]+|[^\S\n]*{_WORD})?)"
    rf"|(?P<end>[\n;&|()]+)|(?P<word>{_WORD})",
    re.DOTALL,
)
_QUOTED = re.compile(rf"'([^']*)'|({_DOUBLE})|\\(.)", re.DOTALL)
_ESCAPED = re.compile(r'\\([$`"\\])')
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`\n]*`")
_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_ALL = re.compile(r"\$(?:@|\*|\{@|\{\*|\{1\+\$@)")
_POSITION = re.compile(r"\$(?:([0-9])|\{([0-9])\})")
_VARIABLE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_FROM_ALL = re.compile(r"\b(\w{1,60})\+?=[^\n;&|=]{0,200}?\$(?:@|\*|\{@|\{\*)")
_OWN = re.compile(r"\$\{?PODWATCH_(?:STEP|CHECKPOINT|RESUME_ARGS)\b")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_KEYWORDS = frozenset({"if", "then", "else", "elif", "do", "while", "until", "!", "{", "}", "time", "command", "eval"})
_BUILTINS = frozenset(
    {"export", "set", "echo", "printf", "source", ".", "trap", "ulimit", "umask", "unset", "declare", "local", "exit",
     "readonly", "shift", "return", "wait", "sleep", "mkdir", "test", "[", "[[", "for", "case", "esac", "fi", "done",
     "true", "false", ":", "alias", "read", "rm", "cp", "mv", "ls", "cat", "date", "pushd", "popd", "touch", "tee"}
)  # fmt: skip
"""They run no trainer, and their words are no arguments of one."""


_MOST_WORDS = 100_000
"""A longer script is no command of a trainer: each ``$@`` repeats all arguments."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """``words``: without assignments before them and redirections. ``passes``: the script's own arguments are among
    them, or a variable that holds these. ``piped``: the next command reads its output."""

    words: tuple[str, ...]
    passes: bool = False
    piped: bool = False


def shell_commands(text: str, arguments: Sequence[str] = (), name: str = "") -> list[ShellCommand]:
    """Every command in the text, in order; those up to a quote that never closes, of at most
    100,000 words. ``arguments`` and ``name`` are the
    script's own ``$@`` and ``$0``."""
    found: list[ShellCommand] = []
    room = _MOST_WORDS
    variables = frozenset(_FROM_ALL.findall(text))
    for raw, end in _split(_prepared(text)):
        words = _without_lead(raw)
        if not words or _unquoted(words[0]) in _BUILTINS:
            continue
        full = [part for word in words for part in _expanded(word, arguments, name)]
        passes = any(_passes(word, variables) for word in words)
        room -= len(full)
        if room < 0:
            break
        if full:
            found.append(ShellCommand(tuple(full), passes, end in ("|", "|&")))
    return found


def uses_resume_variables(text: str) -> bool:
    """Whether the text reads what podwatch exports for a resume: PODWATCH_STEP and so on."""
    return _OWN.search(text) is not None


def has_variable(word: str) -> bool:
    return "$" in word


def _prepared(text: str) -> str:
    """Without here-documents, joined lines as one, and each substitution as the value of a variable."""
    lines, end = [], ""
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        if end:
            end = "" if line.strip() == end else end
            continue
        here = _HERE.search(line)
        lines.append(_HERE.sub("", line) if here else line)
        end = here[2] if here else ""
    joined = "\n".join(lines)
    for _ in range(3):  # nested ones
        joined = _SUBSTITUTION.sub("${_}", joined)
    return joined


def _split(text: str) -> Iterator[tuple[list[str], str]]:
    """(words as written, what ends it) of each command."""
    words: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            if text[position] in "'\"":
                return  # it never closes
            position += 1
            continue
        position = match.end()
        if match["end"]:
            yield words, match["end"].strip()
            words = []
        elif match["word"]:
            words.append(match["word"])
    yield words, ""


def _without_lead(words: list[str]) -> list[str]:
    while words and (words[0] in _KEYWORDS or _ASSIGNMENT.match(words[0])):
        words = words[1:]
    return words


def _unquoted(word: str) -> str:
    def plain(match: re.Match[str]) -> str:
        if match[2] is not None:
            return _ESCAPED.sub(r"\1", match[2][1:-1])
        return match[1] if match[1] is not None else match[3]

    return _QUOTED.sub(plain, word)


def _expanded(word: str, arguments: Sequence[str], name: str) -> list[str]:
    if word.startswith("'"):
        return [_unquoted(word)]
    if _ALL.match(word.replace('"', "")):
        return list(arguments)

    def at(match: re.Match[str]) -> str:
        number = int(match[1] or match[2])
        values = (name, *arguments)
        return values[number] if number < len(values) else match[0]

    return [_POSITION.sub(at, _unquoted(word))]


def _passes(word: str, variables: frozenset[str]) -> bool:
    """``variables``: those to which the script assigns its own arguments."""
    if word.startswith("'"):
        return False
    if _ALL.search(word):
        return True
    variable = _VARIABLE.fullmatch(word.strip('"'))
    return variable is not None and variable[1] in variables
