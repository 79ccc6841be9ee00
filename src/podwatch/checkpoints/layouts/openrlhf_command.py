"""OpenRLHF's command line: how it is told to load, by version, and which of its trainers a command runs."""

from collections.abc import Sequence

from podwatch.checkpoints.layouts import argv
from podwatch.checkpoints.layouts.preset import Preset

PPO_MODULES = ("openrlhf.cli.train_ppo_ray",)
PLAIN_MODULES = ("openrlhf.cli.train_sft", "openrlhf.cli.train_dpo", "openrlhf.cli.train_rm", "openrlhf.cli.train_kd")
NEW, OLD = "--ckpt.load_enable", "--load_checkpoint"
LOAD = (NEW, OLD)
"""From 2026-04-19 (ed62d0e2) on every flag has dots."""


def has_dots(command: Sequence[str]) -> bool | None:
    """Is this the dotted command line? None if no flag tells."""
    flags = [a.partition("=")[0] for a in command if a.startswith("--")]
    if any("." in f for f in flags):
        return True
    return False if any("_" in f for f in flags) else None


def load_preset(command: Sequence[str]) -> Preset:
    """Loading is by ``latest`` alone; no step can be passed. A fresh start must not load: with an empty directory it
    would look for states that are not there."""
    dots = argv.has_flag(command, (NEW,)) or has_dots(command)
    if dots is None and not argv.has_flag(command, (OLD,)):
        return Preset(
            add=None,
            bare=LOAD,
            ask="cannot tell which OpenRLHF version this is, so not how it is told to load",
            example=f'["{NEW}"], or for versions before April 2026 ["{OLD}"]',
        )
    return Preset(add=(NEW if dots else OLD,), bare=LOAD)


def wants_critic(command: Sequence[str]) -> bool | None:
    """Is there a critic to be saved? The command says it before the first save shows it; None if it does not."""
    estimator = argv.flag_value(command, ("--algo.advantage.estimator", "--advantage_estimator"))
    if estimator is not None:
        return estimator == "gae"
    return True if argv.has_flag(command, ("--critic_pretrain",)) else None
