"""Which symbolic links of a manifest can lead out of their checkpoint, and are refused. Pure.

One rule: a target goes up first and then down (``../../sub/file``), and goes up no further than to the top of its part.
No entry of the manifest is below a link, so the directories that it goes up through are real ones, and what it goes
down through is below where it went up to, or is another link, for which the same holds. So no chain of links leads out.
A link may point to a name that is not in the manifest: it then dangles after the restore, as one of a loop does.
"""

from collections.abc import Iterable, Iterator, Sequence

from podwatch.domain.checkpoint import SymlinkEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import deceives

_LONGEST = 1000
"""Characters of a target."""
_MOST_LINKS = 10_000
"""In one manifest: a checkpoint has a handful."""


def check_links(files: Iterable[str], links: Sequence[SymlinkEntry]) -> None:
    """Raise IntegrityError unless every link stays in its part and no entry is below a link. ``files``: their names."""
    if len(links) > _MOST_LINKS:
        raise IntegrityError(f"manifest contains more than {_MOST_LINKS} links", where="symlinks")
    for link, reason in refused_links(files, links):
        raise IntegrityError(f"manifest contains a link that {reason}", where=repr(link.name)[:120])


def restorable(files: Iterable[str], links: Sequence[SymlinkEntry]) -> tuple[SymlinkEntry, ...]:
    """The links that ``check_links`` accepts together."""
    first = tuple(links[:_MOST_LINKS])
    refused = {link.name for link, _ in refused_links(files, first)}
    return tuple(link for link in first if link.name not in refused)


def refused_links(files: Iterable[str], links: Sequence[SymlinkEntry]) -> Iterator[tuple[SymlinkEntry, str]]:
    """Each link that must not be restored, and why."""
    paths = (*files, *(link.name for link in links)) if links else ()
    folders = {path[:end] for path in paths for end, c in enumerate(path) if c == "/"}
    for link in links:
        target = link.target
        segments = [name for name in target.split("/") if name not in ("", ".")]
        down = [name for name in segments if name != ".."]
        up = len(segments) - len(down)
        if link.name in folders:
            yield link, "has other entries below it"
        elif not target or deceives(target) or "\\" in target or len(target) > _LONGEST:
            yield link, "has an invalid target"
        elif segments[up:] != down:
            yield link, 'uses ".." after a name'
        elif target.startswith("/") or up > link.name.count("/") - 1:
            yield link, "leads out of its checkpoint"
