"""How the command that runs differs from the one that is configured, as lines for people. Pure."""

from collections.abc import Callable, Sequence
from difflib import SequenceMatcher


def grouped(argv: Sequence[str]) -> list[str]:
    """Arguments as the operator reads them: a flag and its value are one (``--max-steps 99``)."""
    found: list[str] = []
    for word in argv:
        last = found[-1] if found else ""
        takes = last.startswith("-") and "=" not in last and " " not in last
        if takes and not word.startswith("-") and word != "@":
            found[-1] = f"{last} {word}"
        else:
            found.append(word)
    return found


def differences(running: Sequence[str], configured: Sequence[str], scrub: Callable[[str], str]) -> tuple[str, ...]:
    """``- argument`` runs and is not configured, ``+ argument`` is configured and does not run; in their order. Secrets
    are taken out of each argument together with its flag, and two secrets are not compared."""
    ours = [scrub(group) for group in grouped(running)]
    theirs = [scrub(group) for group in grouped(configured)]
    lines: list[str] = []
    for tag, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if tag != "equal":
            lines += [f"- {word}" for word in ours[a:b]]
            lines += [f"+ {word}" for word in theirs[c:d]]
    return tuple(lines)
