"""How the stored configurations and commands of two runs differ. Pure."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from podwatch.domain.secrets import scrub

CONTEXT_LINES: Final = 3


@dataclass(frozen=True, slots=True)
class StartedWith:
    """What a run was started with, as the store holds it: scrubbed. ``files``: path on the pod -> text.
    ``problems``: what is not stored or not usable."""

    command: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def pairs(old: StartedWith, new: StartedWith) -> list[tuple[str, str]]:
    """Paths of the files that belong together: the same path, else the only one with the same name. An empty path: the
    other run has no such file."""
    left = {path for path in new.files if path not in old.files}
    found: list[tuple[str, str]] = []
    for path in old.files:
        if path in new.files:
            found.append((path, path))
            continue
        name = posixpath.basename(path)
        same = [other for other in left if posixpath.basename(other) == name]
        alone = sum(posixpath.basename(p) == name for p in old.files if p not in new.files) == 1
        if len(same) == 1 and alone:
            left.discard(same[0])
            found.append((path, same[0]))
        else:
            found.append((path, ""))
    return [*found, *(("", path) for path in sorted(left))]


def difference(a: str, old: StartedWith, b: str, new: StartedWith) -> list[str]:
    """A unified diff of commands, files and settings, each line without its line end; empty if they do not differ.
    ``a``, ``b``: the runs' names."""
    lines = _diff(f"{a}: command", list(old.command), f"{b}: command", list(new.command))
    for left, right in pairs(old, new):
        lines += _diff(
            f"{a}: {left}" if left else "/dev/null",
            scrub(old.files[left]).splitlines() if left else [],
            f"{b}: {right}" if right else "/dev/null",
            scrub(new.files[right]).splitlines() if right else [],
        )
    settings = [[f"{key} = {value}" for key, value in sorted(texts.settings.items())] for texts in (old, new)]
    return lines + _diff(
        f"{a}: settings given at the start", settings[0], f"{b}: settings given at the start", settings[1]
    )


def _diff(name: str, old: list[str], other: str, new: list[str]) -> list[str]:
    import difflib

    return list(difflib.unified_diff(old, new, name, other, n=CONTEXT_LINES, lineterm=""))
