"""``layout = "auto"``: which trainer this is, from its command and from what lies in output_dir, and why.

Each layout says for itself whether it recognises the command or the directory. One that is certain, or the only one,
is taken; several are an error that names them all; none says what was looked at.
"""

from collections.abc import Iterable

from podwatch.checkpoints.layouts.base import Kind, Recognition, Site
from podwatch.domain.errors import ConfigurationError

_NAMES_AT_MOST = 8


def choose(site: Site, kinds: Iterable[Kind]) -> Recognition:
    """The one layout that fits. ConfigurationError with the candidates, or with what was looked at."""
    found = recognised(site, kinds)
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
        f"no layout recognises this trainer: {_looked_at(site)}",
        where="trainer.layout",
        fix=f"set it to one of {', '.join(k.name for k in kinds)} (docs/layouts.md says what each is for);"
        ' "custom" takes its rules from [checkpoints.custom]',
    )


def recognised(site: Site, kinds: Iterable[Kind]) -> list[Recognition]:
    """Every layout that something speaks for. A directory that cannot be read speaks for none."""
    found = []
    for kind in kinds:
        try:
            recognition = kind.recognise(site)
        except OSError:
            continue
        if recognition is not None:
            found.append(recognition)
    return found


def _looked_at(site: Site) -> str:
    command = f"the command runs {' '.join(site.command)[:120]!r}" if site.command else "there is no command"
    try:
        names = sorted(p.name for p in site.output_dir.iterdir())
    except OSError:
        return f"{command}, and {site.output_dir} does not exist or cannot be read"
    shown = ", ".join(names[:_NAMES_AT_MOST]) + (", ..." if len(names) > _NAMES_AT_MOST else "")
    return f"{command}, and {site.output_dir} holds {shown or 'nothing'}"
