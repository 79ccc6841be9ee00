"""How many steps the inference samples can be behind the trainer: by-products of those steps are still read."""

from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import argv

STEPS_IN_USE = 2
"""prime-rl's defaults: max_async_level 1, later a lag of 1 batch, and one step that is being written."""
MOST = 1000
_KEYS = ("max_async_level", "max_off_policy_steps")
"""The second since 2026-08, when prime-rl began to remove old broadcasts itself."""
_FLAGS = tuple(f"--{section}{key.replace('_', '-')}" for key in _KEYS for section in ("", "orchestrator.", "trainer."))


def steps_in_use(command: Sequence[str], cwd: Path) -> int:
    """Number of steps below the newest one whose broadcasts and rollouts can still be read: the highest level that the
    command or a configuration file named in it sets, plus one; never fewer than the default. Reads those files."""
    levels = [1]
    for flag in _FLAGS:
        levels.append(_level(argv.flag_value(command, (flag,))))
    for document in argv.toml_documents(command, cwd):
        for section in (document, document.get("orchestrator"), document.get("trainer")):
            if isinstance(section, dict):
                levels.extend(_level(section.get(key)) for key in _KEYS)
    return max(STEPS_IN_USE, max(levels) + 1)


def _level(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        return 0
    try:
        return min(MOST, max(0, int(value)))
    except ValueError:
        return 0
