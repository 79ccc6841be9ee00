"""One small file per trainer family, each behind the ``Layout`` protocol of ``base``; ``KINDS`` is the registry.

An installed package can add a layout by an entry point; the configuration must name it, "auto" does not choose it.
"""

from dataclasses import replace

from podwatch.checkpoints.layouts import (
    accelerate,
    auto,
    custom,
    dcp,
    deepspeed,
    hf,
    lightning,
    megatron,
    nemo,
    nemo_rl,
    open_instruct,
    openrlhf,
    orbax,
    prime_rl,
    runner,
    skyrl,
    torchtitan,
    verl,
)
from podwatch.checkpoints.layouts.base import Concern, Kind, Layout, Recognition, Site
from podwatch.checkpoints.layouts.custom import CustomLayout
from podwatch.checkpoints.layouts.hf import HFLayout
from podwatch.checkpoints.layouts.prime_rl import PrimeRLLayout
from podwatch.config import plugins
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.trainer_log import TrainerLog

__all__ = [
    "KINDS",
    "CustomLayout",
    "HFLayout",
    "Layout",
    "PrimeRLLayout",
    "concerns",
    "kind_of",
    "make_layout",
    "recognised",
    "site_of",
    "trainer_logs",
]

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        prime_rl.KIND,
        verl.KIND,
        torchtitan.KIND,
        dcp.KIND,
        hf.KIND,
        megatron.KIND,
        nemo.KIND,
        accelerate.KIND,
        lightning.KIND,
        deepspeed.KIND,
        openrlhf.KIND,
        skyrl.KIND,
        nemo_rl.KIND,
        orbax.KIND,
        open_instruct.KIND,
        runner.KIND,
        custom.KIND,
    )
}
"""One line per layout, in the order in which they are listed."""


def site_of(settings: Settings) -> Site:
    trainer = settings.trainer
    return Site(trainer.output_dir, trainer.checkpoint_dir, trainer.cwd, trainer.command, settings.checkpoints.custom)


def make_layout(settings: Settings) -> Layout:
    """The layout that the configuration names, or that "auto" detects, for its output directory (which need not exist
    yet). ConfigurationError: unknown, not recognized, or ambiguous."""
    site = site_of(settings)
    kind, chosen_because = _kind(settings, site)
    layout = kind.make(site)
    layout.chosen_because = chosen_because
    return layout


def concerns(settings: Settings) -> tuple[Concern, ...]:
    """Problems of the command or the directory that would make a restart fail, as far as the layout knows. Reads small
    files; can block. ConfigurationError as ``make_layout``."""
    site = site_of(settings)
    return _kind(settings, site)[0].concerns(site)


def _kind(settings: Settings, site: Site) -> tuple[Kind, str]:
    """The layout's entry in the registry, and why "auto" chose it (empty if the configuration names it)."""
    name: str = settings.trainer.layout
    chosen_because = ""
    if name == "auto":
        found = auto.choose(site, KINDS.values())
        name, chosen_because = found.layout, found.why
    return kind_of(name), chosen_because


def trainer_logs(settings: Settings) -> tuple[TrainerLog, ...]:
    """The log lines of every trainer that podwatch knows, and of the configured one if a package added it: a script
    can print the lines of another library than the one that saves its checkpoints. ConfigurationError as
    ``make_layout``."""
    own, _ = _kind(settings, site_of(settings))
    added = () if own.name in KINDS else (own.log,)
    return (*added, *(kind.log for kind in KINDS.values()))


def kind_of(name: str) -> Kind:
    """The registry's entry, else that of an installed package. ConfigurationError: unknown, or the package fails."""
    kind = KINDS.get(name)
    if kind is not None:
        return kind
    plugin = plugins.find(plugins.LAYOUTS, name)
    if plugin is None:
        raise ConfigurationError(
            f"unknown layout {name!r}", where="trainer.layout", fix=f"choose one of {', '.join(KINDS)}"
        )
    return _added(plugin)


def _added(plugin: plugins.Plugin) -> Kind:
    """The entry of an installed package, which defines a ``Kind``, or only its ``make``."""
    loaded = plugin.load()
    kind = loaded if isinstance(loaded, Kind) else Kind(plugin.entry.name, loaded, lambda _site: None)

    def make(site: Site) -> Layout:
        with plugin.blamed():
            layout = kind.make(site)
        plugin.check_protocol(layout, Layout)
        if layout.name != plugin.entry.name:
            raise plugin.error(f"returns a layout with the name {layout.name!r}")
        return layout

    def found(site: Site) -> tuple[Concern, ...]:
        with plugin.blamed():
            return kind.concerns(site)

    return replace(kind, make=make, concerns=found)


def recognised(site: Site) -> list[Recognition]:
    """Every layout that recognizes the command or the directory; for commands that inspect a machine."""
    return auto.recognised(site, KINDS.values())
