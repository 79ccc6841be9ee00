"""OpenRLHF's command line: how it loads a checkpoint, by version, and which trainer a command runs."""

from collections.abc import Sequence

from podwatch.checkpoints.layouts import command_line
from podwatch.checkpoints.layouts.resume_flags import Preset

PPO_MODULES = ("openrlhf.cli.train_ppo_ray",)
PLAIN_MODULES = ("openrlhf.cli.train_sft", "openrlhf.cli.train_dpo", "openrlhf.cli.train_rm", "openrlhf.cli.train_kd")
NEW, OLD = "--ckpt.load_enable", "--load_checkpoint"
LOAD = (NEW, OLD)
"""From 2026-04-19 (ed62d0e2) on every flag has dots."""


def has_dots(command: Sequence[str]) -> bool | None:
    """Whether the command uses dotted flags. None if no flag shows it."""
    flags = [a.partition("=")[0] for a in command if a.startswith("--")]
    if any("." in f for f in flags):
        return True
    return False if any("_" in f for f in flags) else None


def load_preset(command: Sequence[str]) -> Preset:
    """OpenRLHF loads what ``latest`` names; no step can be passed. A fresh start must not load: with an empty directory
    it would fail."""
    dots = command_line.has_flag(command, (NEW,)) or has_dots(command)
    if dots is None and not command_line.has_flag(command, (OLD,)):
        return Preset(
            add=None,
            bare=LOAD,
            ask="podwatch cannot determine the OpenRLHF version, so not which flag makes it load",
            example=f'["{NEW}"], or for versions before April 2026 ["{OLD}"]',
        )
    return Preset(add=(NEW if dots else OLD,), bare=LOAD)


def wants_critic(command: Sequence[str]) -> bool | None:
    """Whether the command saves a critic; None if the command does not show it."""
    estimator = command_line.flag_value(command, ("--algo.advantage.estimator", "--advantage_estimator"))
    if estimator is not None:
        return estimator == "gae"
    return True if command_line.has_flag(command, ("--critic_pretrain",)) else None
