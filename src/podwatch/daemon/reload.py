"""The settings that a reload changes while podwatch runs. Pure. config/loading.py lists the refused ones."""

from podwatch.config.keys import known_keys
from podwatch.config.settings import Settings

_LIVE = (
    "mode",
    "trainer.command",
    "trainer.cwd",
    "trainer.env",
    "trainer.env_file",
    "trainer.user",
    "trainer.nofile",
    "trainer.resume_args",
    "trainer.max_steps",
    "trainer.stop_grace",
    "trainer.save_grace",
    "trainer.resume_attempts",
    "trainer.startup_patience",
    "trainer.supervise",
    "gpu.hold",
    "gpu.floor",
    "gpu.release_wait",
    "gpu.release_margin",
    "hang.*",
    "disk.prune_above",
    "disk.prune_to",
    "disk.margin",
    "disk.lead",
    "disk.on_full",
    "recovery.*",
    "sync.max_lag",
)
"""Read at each turn or at each start of training. All other settings are read when podwatch starts."""


def waits_for_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Changed keys that take effect only at the next start of podwatch."""
    return tuple(key for key in known_keys() if not _live(key) and _value(old, key) != _value(new, key))


def _live(key: str) -> bool:
    return key in _LIVE or f"{key.partition('.')[0]}.*" in _LIVE


def _value(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
