"""Names of runs, files and objects that a stranger may have chosen: which are safe to use, and to show. Pure."""

import re

from podwatch.domain.errors import IntegrityError

_RUN_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_PLAIN = re.compile(r"(?:(?!\.{1,2}(?:/|\Z))[ -.0-\[\]-~]{1,255}(?:/(?!\Z)|\Z))+")
"""Most paths: of printable ASCII, without a backslash. Quicker than what the others need."""
_DECEIVING = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def valid_run_id(text: str) -> bool:
    """Whether ``text`` is a safe path segment: letters, digits, ``.``, ``_`` and ``-``, at most 128 characters."""
    return bool(_RUN_ID.match(text)) and ".." not in text


def check_relative_path(path: str) -> str:
    """Return ``path`` if it is safe to join below a directory, else raise IntegrityError.

    Refused: empty or absolute paths, backslashes, control characters, ``.``, ``..`` and empty segments, names that no
    file system or store can hold, and names that display differently from what they are.
    """
    if len(path) <= 900 and _PLAIN.fullmatch(path):
        return path
    segments = path.split("/")
    if (
        not path
        or path.startswith("/")
        or "\\" in path
        or deceives(path)
        or any(s in ("", ".", "..") or len(s.encode("utf-8", "surrogatepass")) > 255 for s in segments)
        or len(path.encode("utf-8", "surrogatepass")) > 900
    ):
        raise IntegrityError("unsafe path", where=repr(path)[:120], fix="podwatch ignores the object")
    return path


def deceives(text: str) -> bool:
    """Whether ``text`` contains control characters (C1 too: terminals interpret them), lone surrogates, line separators
    or characters that change the writing direction."""
    return _DECEIVING.search(text) is not None
