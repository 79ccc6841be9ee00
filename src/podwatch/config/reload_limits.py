"""Which changed settings a reload refuses, and which take effect only at the next start of podwatch. Pure."""

from podwatch.config.setting_names import known_keys
from podwatch.config.settings import Settings

_FIXED = (
    "run_id",
    "state_dir",
    "trainer.layout",
    "trainer.output_dir",
    "trainer.checkpoint_dir",
    "checkpoints.custom",
    "sync.store",
    "http.enabled",
    "http.host",
    "http.port",
    "http.password_file",
    "nodes.rank",
    "nodes.count",
)


def refused_by_reload(old: Settings, new: Settings) -> tuple[str, ...]:
    """Dotted keys that differ and with which podwatch refuses the whole reload: another run, or another place."""
    return tuple(key for key in _FIXED if _value(old, key) != _value(new, key))


_LIVE = (
    "mode",
    "log_rules",
    "trainer.command",
    "trainer.cwd",
    "trainer.env",
    "trainer.env_file",
    "trainer.user",
    "trainer.nofile",
    "trainer.resume_args",
    "trainer.max_steps",
    "trainer.start_before",
    "trainer.stop_also",
    "trainer.stop_grace",
    "trainer.save_grace",
    "trainer.resume_attempts",
    "trainer.startup_patience",
    "trainer.supervise",
    "gpu.hold",
    "gpu.floor",
    "gpu.release_wait",
    "gpu.release_margin",
    "inference.sleep",
    "hang.*",
    "disk.*",
    "recovery.*",
    "end_pod.*",
    "resources.*",
    "evaluation.reserve",
    "training.*",
    "sync.max_lag",
)
"""Read at each turn, at each start of training, or when they are needed. ``*``: the section without ``_AT_START``."""
_AT_START = frozenset(
    {
        "disk.capacity",
        "recovery.end_grace",
        "recovery.job_attempts",
        "recovery.bad_host_for",
        "training.metrics_file",
        "training.metrics_url",
    }
)
_NOT_OURS = ("checks", "controller.*")
"""Read from the file by the command that uses them: no podwatch has to start again."""


def waits_for_restart(old: Settings, new: Settings) -> tuple[str, ...]:
    """Changed keys that take effect only at the next start of podwatch."""
    return tuple(key for key in known_keys() if not _live(key) and _value(old, key) != _value(new, key))


def _live(key: str) -> bool:
    known, section = (*_LIVE, *_NOT_OURS), f"{key.partition('.')[0]}.*"
    return key in known or (section in known and key not in _AT_START)


def _value(settings: Settings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
