"""How to resume programs that use the Hugging Face Trainer.

``resume_from_checkpoint`` among the training arguments has no effect alone: the program must pass it to
``Trainer.train()``. axolotl, LLaMA-Factory and ms-swift do; trl's own scripts do not.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import argv
from podwatch.checkpoints.layouts.base import Site
from podwatch.checkpoints.layouts.preset import Preset
from podwatch.checkpoints.layouts.program import Program, program
from podwatch.system.reading import read_file

FLAG = "--resume_from_checkpoint"
_AXOLOTL = "--auto-resume-from-checkpoints"
_SCRIPT_LIMIT = 1 << 20


def preset(site: Site, command: Sequence[str]) -> Preset:
    seen = program(command, site.working_directory)
    usual = Preset(add=(FLAG, "{checkpoint}"), flags=(FLAG,), example=f'["{FLAG}", "{{checkpoint}}"]')
    if seen.calls("llamafactory-cli") or seen.runs("llamafactory"):
        if any(a.endswith((".yaml", ".yml", ".json")) for a in seen.arguments):
            key = FLAG.lstrip("-")
            return Preset(add=(f"{key}={{checkpoint}}",), keys=(key,))
        return usual
    if seen.calls("axolotl") or seen.runs("axolotl.cli"):
        return _axolotl(command)
    if seen.calls("trl") or seen.runs("trl.scripts", "trl.cli"):
        return _unable(
            "trl's own scripts call Trainer.train() without a checkpoint, so they would restart at step 0",
            "a program of your own that calls trainer.train(resume_from_checkpoint=...)",
        )
    if (seen.calls("swift") or seen.runs("swift.cli")) and _versioned(command, seen):
        return _unable(
            "ms-swift writes every launch into a new versioned directory below output_dir",
            'the same after adding "--add_version", "false" to trainer.command',
        )
    if _ignores(seen, site.working_directory):
        return _unable(
            f"{seen.name} calls Trainer.train() without a checkpoint, so it would restart at step 0",
            f'["{FLAG}", "{{checkpoint}}"] once it calls trainer.train(resume_from_checkpoint=...)',
        )
    return usual


def _axolotl(command: Sequence[str]) -> Preset:
    flag = "--resume-from-checkpoint"
    if "--" in command and "{resume_args}" not in command:
        return Preset(
            add=None,
            flags=(flag,),
            bare=(_AXOLOTL,),
            ask='arguments after "--" go to the launcher, so a resume flag at the end would not reach axolotl',
            example='the same after putting "{resume_args}" before "--" in trainer.command',
        )
    return Preset(add=(flag, "{checkpoint}"), flags=(flag,), bare=(_AXOLOTL,))


def _unable(why: str, example: str) -> Preset:
    return Preset(add=None, flags=(FLAG,), ask=why, example=example)


def _versioned(command: Sequence[str], seen: Program) -> bool:
    value = argv.flag_value(command, ("--add_version",))
    return (value or "true").lower() != "false" and "--add_version false" not in seen.shell


def _ignores(seen: Program, cwd: Path) -> bool:
    """Whether the script itself trains, without any mention of a checkpoint to resume from."""
    if not seen.script.endswith(".py"):
        return False
    path = cwd / seen.script
    try:
        text = read_file(path, _SCRIPT_LIMIT).decode(errors="replace")
    except (OSError, ValueError):
        return False
    return re.search(r"\.train\(\s*\)", text) is not None and "resume_from_checkpoint" not in text
