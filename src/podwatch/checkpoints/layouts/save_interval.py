"""The number of steps between two saves, as the command of a run configures it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podwatch.checkpoints.layouts import argv

_FLAGS: Mapping[str, tuple[str, ...]] = {
    "prime-rl": ("--ckpt.interval", "--trainer.ckpt.interval"),
    "hf": ("--save_steps",),
    "megatron": ("--save-interval",),
    "torchtitan": ("--checkpoint.interval",),
}
_KEYS: Mapping[str, tuple[str, ...]] = {
    "verl": ("trainer.save_freq",),
    "skyrl": ("trainer.ckpt_interval",),
    "nemo-rl": ("checkpointing.save_period",),
}
"""Overrides as Hydra and OmegaConf read them."""


def save_interval(layout: str, command: Sequence[str], cwd: Path) -> int | None:
    """Steps from one save to the next; None where neither the command nor a TOML file that it names sets it. A default
    of the trainer is not assumed: another option often decides whether it saves at all. Reads small files; can
    block."""
    if layout == "hf" and argv.flag_value(command, ("--save_strategy",)) not in (None, "steps"):
        return None
    direct = argv.positive(argv.flag_value(command, _FLAGS.get(layout, ())))
    if direct is None:
        direct = argv.positive(argv.key_value(command, _KEYS.get(layout, ())))
    if direct is not None or layout != "prime-rl":
        return direct
    found = [
        value
        for document in argv.toml_documents(command, cwd)
        for holder in (document, _table(document, "trainer"))
        if (value := _positive(_table(holder, "ckpt").get("interval"))) is not None
    ]
    return found[-1] if found else None


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _table(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = document.get(name)
    return section if isinstance(section, dict) else {}
