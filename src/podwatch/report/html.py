"""Makes HTML for the page: everything is text unless ``tag`` made it, and is escaped here."""

from typing import Final

from podwatch.report.terminal_text import NO_BREAK

KEPT: Final = f"\n{NO_BREAK}"
_ESCAPES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})
"""As html.escape(), whose module brings its table of entities: 1 MiB."""
VOID: Final = frozenset({"meta", "link", "br"})
SHAPES: Final = frozenset({"rect", "path"})
"""Of SVG: they need their slash, or the next one is inside."""


class Html(str):
    """Text that is HTML already. Only ``tag``, ``joined`` and constants make it."""

    __slots__ = ()


def escaped(value: object) -> Html:
    """``value`` as text: without control characters, surrogates and marks of direction, and escaped."""
    if isinstance(value, Html):
        return value
    text = str(value)
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in KEPT else " " for c in text)
    return Html(text.translate(_ESCAPES))


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """One element. ``class_`` is ``class``; ``_`` in other attributes is ``-``. None and False leave one out."""
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in SHAPES:
        return Html(f"<{name}{given}/>")
    inside = "" if name in VOID else f"{joined(*children)}</{name}>"
    return Html(f"<{name}{given}>{inside}")


def joined(*children: object) -> Html:
    return Html("".join(map(escaped, children)))
