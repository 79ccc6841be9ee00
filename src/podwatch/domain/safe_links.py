"""Which symbolic links of a manifest lead out of their checkpoint, or nowhere, and are refused. Pure.

They are resolved as the kernel will resolve them after a restore. A target's text is not enough: with ``a -> sub``
and ``b -> a/../../x`` each target looks harmless. So every link is resolved against the manifest's own files and
links, segment by segment, through other links as well.

A link is allowed to point to any name inside its own part, even to one that is not in the manifest: the link then
dangles after the restore. ``..`` after such a name is refused, because it is not known whether it is a directory.
"""

from collections.abc import Iterable, Sequence

from podwatch.domain.checkpoint import SymlinkEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import deceives

_MOST_FOLLOWED = 40
"""Links on the way to one target; the kernel's own limit."""
_LONGEST = 1000
"""Characters of a target."""
_MOST_SEGMENTS = 400
"""On the way to one target, links included."""
_MOST_LINKS = 10_000
"""In one manifest: a checkpoint has a handful."""


def check_links(files: Iterable[str], links: Sequence[SymlinkEntry]) -> None:
    """Raise IntegrityError unless every link, fully resolved, stays in its part and no entry is below a link.
    ``files``: their names."""
    if len(links) > _MOST_LINKS:
        raise IntegrityError(f"manifest contains more than {_MOST_LINKS} links", where="symlinks")
    for link, reason in _bad(files, links):
        raise IntegrityError(f"manifest contains a link that {reason}", where=repr(link.name)[:120])


def restorable(files: Sequence[str], links: Sequence[SymlinkEntry]) -> tuple[SymlinkEntry, ...]:
    """The links that ``check_links`` accepts together. Leaving one out can change the target of another."""
    left = tuple(links[:_MOST_LINKS])
    while bad := {link.name for link, _ in _bad(files, left)}:
        left = tuple(link for link in left if link.name not in bad)
    return left


def _bad(files: Iterable[str], links: Sequence[SymlinkEntry]) -> Iterable[tuple[SymlinkEntry, str]]:
    if not links:
        return
    targets = {link.name: link.target for link in links}
    paths = (*files, *targets)
    folders = {path[:end] for path in paths for end, c in enumerate(path) if c == "/"}
    for link in links:
        if reason := _reason(link, targets, folders):
            yield link, reason


def _reason(link: SymlinkEntry, targets: dict[str, str], folders: set[str]) -> str:
    if link.name in folders:
        return "has other entries below it"
    target = link.target
    if not target or deceives(target) or "\\" in target or len(target) > _LONGEST:
        return "has an invalid target"
    return _leaves(link.name, targets, folders)


def _leaves(path: str, targets: dict[str, str], folders: set[str]) -> str:
    """Why this link leaves its part or never resolves; empty if it stays inside."""
    part, *here = path.split("/")[:-1]
    pending = targets[path].split("/")[::-1]
    if targets[path].startswith("/"):
        return "leads out of its checkpoint"
    followed, segments = 1, 0
    while pending:
        name = pending.pop()
        segments += 1
        if segments > _MOST_SEGMENTS:
            return "never ends"
        if name in ("", "."):
            continue
        known = not here or "/".join((part, *here)) in folders
        if name == "..":
            if not here:
                return "leads out of its checkpoint"
            if not known:
                return 'uses ".." after a name that is no directory in the manifest'
            here.pop()
            continue
        here.append(name)
        now = "/".join((part, *here))
        if known and now in targets:
            followed += 1
            if followed > _MOST_FOLLOWED:
                return "never ends"
            if targets[now].startswith("/"):
                return "leads out of its checkpoint"
            here.pop()
            pending += targets[now].split("/")[::-1]
    return ""
