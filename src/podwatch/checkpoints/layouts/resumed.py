"""Which step a running command resumes from, as far as its own resume flags say."""

import os
import re
from collections.abc import Sequence

from podwatch.checkpoints.layouts.base import Layout
from podwatch.domain.errors import PodwatchError

_NUMBER = re.compile(r"\d{1,15}")


def resumed_step(layout: Layout, command: Sequence[str]) -> int | None:
    """The step that the layout's resume flags in ``command`` name, as a number or as a checkpoint that is here. None
    where they name none, the newest one ("latest", -1), or several. Blocks: may list the checkpoint directories."""
    try:
        flags = layout.resume_command(command, 0, (), {}).removed
    except (PodwatchError, OSError):
        return None
    found: set[int] = set()
    for word in flags:
        name, equals, inline = word.partition("=")
        if word.startswith("-") and not equals:
            continue
        value = (inline if equals else name).strip("'\"")
        if _NUMBER.fullmatch(value):
            found.add(int(value))
        elif value:
            found.update(_step_at(layout, value))
    return found.pop() if len(found) == 1 else None


def _step_at(layout: Layout, value: str) -> set[int]:
    """The step whose directory ``value`` is, absolute or as the end of its path."""
    wanted = os.path.normpath(value)
    try:
        return {
            step
            for step in layout.steps()
            for path in layout.step_paths(step)
            if str(path) == wanted or (not wanted.startswith(os.sep) and str(path).endswith(os.sep + wanted))
        }
    except OSError:
        return set()
