"""Layouts and stores of installed packages, found by entry point (docs/contributing.md).

A package is imported only when the configuration names what it adds, so that another package, broken or not, has no
effect. Until then only metadata is read, and only by commands that load settings.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podwatch.domain.errors import ConfigurationError, PodwatchError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LAYOUTS, STORES = "podwatch.layouts", "podwatch.stores"
"""Entry point groups. Of a layout the name is that of ``trainer.layout``; of a store it is the scheme of the URL."""
_SETTING = {LAYOUTS: "trainer.layout", STORES: "sync.store"}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package."""

    entry: "EntryPoint"

    @property
    def package(self) -> str:
        """Name and version of the package."""
        distribution = self.entry.dist
        return f"{distribution.name} {distribution.version}" if distribution is not None else self.entry.module

    def load(self) -> Any:
        """Import the package. ConfigurationError with package, entry point and exception."""
        with self.blamed():
            return self.entry.load()

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn every exception of the package's code, except podwatch's own, into a ConfigurationError naming it."""
        try:
            yield
        except PodwatchError:
            raise
        except (Exception, SystemExit) as error:
            raise self.error(f"raises {type(error).__name__}: {error}") from error

    def check_protocol(self, made: object, protocol: type) -> None:
        """ConfigurationError if ``made`` lacks a member of ``protocol``: written for another version of podwatch."""
        names = {*protocol.__annotations__, *vars(protocol)}
        missing = sorted(n for n in names if not n.startswith("_") and not hasattr(made, n))
        if missing:
            raise self.error(f"returns a {type(made).__name__}, which lacks {', '.join(missing)}")

    def error(self, what: str) -> ConfigurationError:
        entry = self.entry
        return ConfigurationError(
            f'the package {self.package} cannot be used: its entry point "{entry.name} = {entry.value}" in'
            f" {entry.group} {what}",
            where=_SETTING[entry.group],
            fix="repair or update the package, or choose another value",
        )


def installed(group: str) -> tuple[Plugin, ...]:
    """All plug-ins of one group. Reads the entry points of every package: some milliseconds for a hundred packages."""
    from importlib.metadata import entry_points

    return tuple(Plugin(entry) for entry in entry_points(group=group))


def names(group: str) -> tuple[str, ...]:
    """The names that installed packages add."""
    return tuple(p.entry.name for p in installed(group))


def find(group: str, name: str) -> Plugin | None:
    """The plug-in of this name, if there is one. ConfigurationError, naming the packages, if several define it."""
    found = [p for p in installed(group) if p.entry.name == name]
    if len(found) > 1:
        raise ConfigurationError(
            f"the packages {' and '.join(p.package for p in found)} both define {name!r} in {group}",
            where=_SETTING[group],
            fix="uninstall one of them",
        )
    return found[0] if found else None


def known(group: str, name: str, built_in: Collection[str]) -> bool:
    """Whether podwatch or an installed package defines ``name``. Imports nothing. ValueError, naming the package, if
    both define it, or two packages do."""
    try:
        plugin = find(group, name)
    except ConfigurationError as error:
        raise ValueError(f"{error.what}; {error.fix}") from None
    if plugin is not None and name in built_in:
        raise ValueError(
            f"{name!r} is podwatch's own, but the package {plugin.package} defines it in {group} too;"
            " uninstall that package, or let its author rename it"
        )
    return plugin is not None or name in built_in
