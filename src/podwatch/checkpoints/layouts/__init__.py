"""One small file per trainer family, each behind the ``Layout`` protocol of ``base``."""

from podwatch.checkpoints.layouts.base import Layout
from podwatch.checkpoints.layouts.custom import CustomLayout
from podwatch.checkpoints.layouts.hf import HFLayout
from podwatch.checkpoints.layouts.prime_rl import PrimeRLLayout
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError

__all__ = ["CustomLayout", "HFLayout", "Layout", "PrimeRLLayout", "make_layout"]


def make_layout(settings: Settings) -> Layout:
    """The layout a configuration names, for its output directory (which need not exist yet)."""
    trainer = settings.trainer
    if trainer.layout == "hf":
        return HFLayout(trainer.output_dir)
    if trainer.layout == "custom":
        if settings.checkpoints.custom is None:
            raise ConfigurationError(
                'layout = "custom" needs a [checkpoints.custom] section',
                where="trainer.layout",
                fix="say there where one step lies (step_dir) and what it must contain (required)",
            )
        return CustomLayout(trainer.output_dir, settings.checkpoints.custom)
    return PrimeRLLayout(
        trainer.output_dir, checkpoint_dir=trainer.checkpoint_dir, cwd=trainer.cwd, command=trainer.command
    )
