"""Chooses the layout for ``layout = "auto"`` from the command and the content of output_dir, with the reason.

A certain layout, or the only one, is chosen; several are an error that names them all; none is an error that shows what
was examined.
"""

from collections.abc import Iterable

from podwatch.checkpoints.layout import Kind, Recognition, Site
from podwatch.domain.errors import ConfigurationError

_NAMES_AT_MOST = 8


def fitting(site: Site, kinds: Iterable[Kind]) -> list[Recognition]:
    """Every layout with any evidence in the command or the directory. A directory that cannot be read is no
    evidence."""
    found = []
    for kind in kinds:
        try:
            recognition = kind.recognise(site)
        except OSError:
            continue
        if recognition is not None:
            found.append(recognition)
    return found


def choose(site: Site, kinds: Iterable[Kind]) -> Recognition:
    """The one layout that fits. ConfigurationError with the candidates, or with what was examined."""
    found = fitting(site, kinds)
    certain = [r for r in found if r.certain]
    candidates = certain or found
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        listed = "; ".join(f"{r.layout}: {r.why}" for r in candidates)
        raise ConfigurationError(
            f"several layouts fit: {listed}",
            where="trainer.layout",
            fix=f'set it to the right one, for example layout = "{candidates[0].layout}"',
        )
    raise ConfigurationError(
        f"no layout recognizes this trainer: {_looked_at(site)}",
        where="trainer.layout",
        fix=f"set it to one of {', '.join(k.name for k in kinds)} (docs/layouts.md describes each);"
        ' "custom" takes its rules from [checkpoints.custom]',
    )


def _looked_at(site: Site) -> str:
    command = f"the command runs {' '.join(site.command)[:120]!r}" if site.command else "there is no command"
    try:
        names = sorted(p.name for p in site.output_dir.iterdir())
    except OSError:
        return f"{command}, and {site.output_dir} does not exist or cannot be read"
    shown = ", ".join(names[:_NAMES_AT_MOST]) + (", ..." if len(names) > _NAMES_AT_MOST else "")
    return f"{command}, and {site.output_dir} holds {shown or 'nothing'}"
