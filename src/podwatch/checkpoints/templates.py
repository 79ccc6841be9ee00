"""Names that contain a step: ``global_step_{step}``, ``iter_{step:07d}``, ``{name}{number}``. Pure."""

import re
from functools import lru_cache

_FIELD = re.compile(r"\{(step|number|name)(?::0?(\d{1,2})d?)?\}|(\*)")
_PLAIN = "(0|[1-9][0-9]{0,17})"
_ANY = "([0-9]{1,18})"
_WORDS = "((?:[A-Za-z][A-Za-z0-9]*[-_=])*)"
_LONG = re.compile(r"[0-9a-f]{16,}")
_DIGITS = re.compile(r"\d+")


def has_step(text: str) -> bool:
    return "{step" in text or "{number" in text


@lru_cache(maxsize=256)
def pattern_of(template: str) -> re.Pattern[str]:
    """Matches a whole name. The group ``step`` is the number."""

    def field(match: re.Match[str]) -> str:
        kind, width = match[1], int(match[2] or 0)
        if match[3]:
            return ".*"
        if kind == "name":
            return f"(?P<name>{_WORDS[1:-1]})"
        if kind == "number" or not width:
            return f"(?P<step>{(_ANY if kind == 'number' else _PLAIN)[1:-1]})"
        return f"(?P<step>[0-9]{{{width}}}|[1-9][0-9]{{{width},17}})"

    parts, end = [], 0
    for match in _FIELD.finditer(template):
        parts += [re.escape(template[end : match.start()]), field(match)]
        end = match.end()
    return re.compile("".join((*parts, re.escape(template[end:]))), re.DOTALL)


def number_in(template: str, text: str) -> int | None:
    """The step in a name; None if the template does not match all of it, or says none."""
    match = pattern_of(template).fullmatch(text) if has_step(template) else None
    return int(match["step"]) if match is not None else None


def name_of(template: str, step: int, like: str = "") -> str:
    """The name of a step that does not exist yet. ``like``: the name of another one, for words and width. Where names
    need not tell the step, as Lightning's, a new one does."""
    other = pattern_of(template).fullmatch(like) if like else None
    digits = other["step"] if other is not None and has_step(template) else ""
    usual = len(digits) if digits.startswith("0") and len(digits) > 1 else 0

    def field(match: re.Match[str]) -> str:
        if match[3]:
            return "" if has_step(template) else f"step={step}"
        if match[1] == "name":
            return other["name"] if other is not None else "step_"
        return f"{step:0{int(match[2] or usual)}d}"

    return _FIELD.sub(field, template)


def glob_of(text: str) -> str:
    """A glob that matches exactly this text."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def form_of(name: str) -> str:
    """The name without its numbers: two saves of one run have the same."""
    return _DIGITS.sub("#", _LONG.sub("#", name))
