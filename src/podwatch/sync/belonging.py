"""Decides whose files may be sent: a user can hard-link another user's file into an own directory; no path shows
that."""

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from podwatch.checkpoints.catalogue import SetContents
from podwatch.sync.engine import SetForeign
from podwatch.sync.linked import foreign
from podwatch.system.pinned import PinnedTree


def owners_of(tree: PinnedTree) -> tuple[int, ...]:
    """Users whose files may have several names, wherever the files are: the training's user, the owners of the
    configured directories, and podwatch. Never root: files of root are judged by their directory. Raises RootReplaced.
    """
    found = {os.geteuid()} if tree.owner is None else {tree.owner, os.geteuid()}
    for root in tree.roots:
        with suppress(FileNotFoundError), tree.directory(root) as fd:
            found.add(os.fstat(fd).st_uid)
    return tuple(sorted(found - {0}))


def check_contents(tree: PinnedTree, contents: SetContents, owners: Collection[int]) -> None:
    """For a checkpoint that is sent from our own hard links, whose directories do not show the owner: judge each file
    where the trainer wrote it. Raises SetForeign, RootReplaced or OSError."""
    roots = {p.part.name: Path(p.part.path) for p in contents.parts}
    for file in contents.files:
        with tree.parent(roots[file.part] / file.path) as (directory, name):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if reason := foreign(found, os.fstat(directory), owners):
                raise SetForeign(reason, where=f"{file.part}/{file.path}")
