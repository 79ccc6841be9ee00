"""One small file per trainer family, each behind the ``Layout`` protocol of ``base``; ``KINDS`` is the registry.

An installed package can add a layout by an entry point; the configuration must name it, "auto" does not choose it.
"""

from dataclasses import replace

from podwatch.checkpoints.layout import Concern, Kind, Layout, Recognition, Site
from podwatch.checkpoints.trainers import (
    accelerate,
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
from podwatch.checkpoints.trainers.choose_layout import choose, fitting
from podwatch.checkpoints.trainers.prime_rl import PrimeRLLayout
from podwatch.config import plugins
from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError, PodwatchError
from podwatch.domain.process import ProcessNames
from podwatch.domain.trainer_log import TrainerLog

__all__ = [
    "KINDS",
    "Layout",
    "PrimeRLLayout",
    "concerns",
    "kind_of",
    "make_layout",
    "process_names",
    "recognised",
    "restart_concerns",
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
        found = choose(site, KINDS.values())
        name, chosen_because = found.layout, found.why
    return kind_of(name), chosen_because


def recognised(site: Site) -> list[Recognition]:
    """Every layout with any evidence in the command or the directory."""
    return fitting(site, KINDS.values())


def trainer_logs(settings: Settings) -> tuple[TrainerLog, ...]:
    """The log lines of every trainer that podwatch knows, and of the configured one if a package added it: a script
    can print the lines of another library than the one that saves its checkpoints. ConfigurationError: the package
    fails."""
    return tuple(kind.log for kind in _known(settings))


def process_names(settings: Settings | None = None) -> tuple[ProcessNames, ...]:
    """The process names of every trainer that podwatch knows, and of the configured one as ``trainer_logs``. Without
    ``settings`` only podwatch's own: for commands that look at all processes."""
    return tuple(kind.processes for kind in _known(settings))


def _known(settings: Settings | None) -> tuple[Kind, ...]:
    name = "auto" if settings is None else settings.trainer.layout
    return (*(() if name == "auto" or name in KINDS else (kind_of(name),)), *KINDS.values())


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


# -- can a restart resume? ---------------------------------------------------------------------------------------------

_OURS = ("trainer.resume_args", "trainer.command")
"""An error about these settings holds for every step; other errors can disappear with the first checkpoint."""


def restart_concerns(settings: Settings, layout: Layout) -> tuple[Concern, ...]:
    """Problems that the layout finds in command and directory, and whether it knows how to pass a step. Reads small
    files; can block. Empty where podwatch has no command to start."""
    trainer = settings.trainer
    if not trainer.command:
        return ()
    try:
        found = concerns(settings)
    except (PodwatchError, OSError, ValueError):
        found = ()  # an unreadable or invalid path is no reason not to start
    try:
        made = layout.resume_command(trainer.command, 1, trainer.resume_args, {})
    except ConfigurationError as error:
        # sometimes only the first checkpoint shows prime-rl's version
        if error.where in _OURS and (layout.variant or layout.name != "prime-rl"):
            what = f"a restart cannot resume: {error.what}"
            return (*found, Concern("resume", what, f"{error.where}: {error.fix}", certain=True))
    except (PodwatchError, OSError, ValueError):
        return found  # this needs a checkpoint
    else:
        if made.argv == trainer.command and trainer.resume_args not in ("auto", "none"):
            what = "a restart cannot resume: trainer.resume_args adds nothing to the command"
            return (*found, Concern("resume", what, 'set it to a list such as ["--resume", "{checkpoint}"]', True))
    return found
