"""The differences between the running command and the configured one, as lines to show. Pure."""

from collections.abc import Callable, Sequence

Scrub = Callable[[str], str]
"""Removes secrets from a text."""


def grouped(argv: Sequence[str]) -> list[str]:
    """``argv`` with each flag and its value joined (``--max-steps 99``)."""
    found: list[str] = []
    for word in argv:
        last = found[-1] if found else ""
        takes = last.startswith("-") and "=" not in last and " " not in last
        if takes and not word.startswith("-") and word != "@":
            found[-1] = f"{last} {word}"
        else:
            found.append(word)
    return found


def differences(running: Sequence[str], configured: Sequence[str], scrub: Scrub) -> tuple[str, ...]:
    """``- argument`` is only in the running command, ``+ argument`` only in the configured one; in their order.
    ``scrub`` removes secrets from each argument with its flag, so two secrets are not compared."""
    if list(running) == list(configured):
        return ()
    from difflib import SequenceMatcher  # 0.15 MiB that a daemon whose command is the configured one does not need

    ours = [scrub(group) for group in grouped(running)]
    theirs = [scrub(group) for group in grouped(configured)]
    lines: list[str] = []
    for tag, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag != "equal":
            lines += [f"- {word}" for word in ours[a:b]]
            lines += [f"+ {word}" for word in theirs[c:d]]
    return tuple(lines)
