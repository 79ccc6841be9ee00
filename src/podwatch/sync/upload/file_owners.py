"""Decides whose files may be sent: a user can hard-link another user's file into an own directory; no path shows
that.
"""

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from podwatch.system.pinned_directories import PinnedTree

if TYPE_CHECKING:
    from podwatch.checkpoints.known_checkpoints import SetContents

# -- files with several names ----------------------------------------------------------------------------------------
# Judged by their owner and the directory in which they were found.


def foreign(file: os.stat_result, directory: os.stat_result, owners: Collection[int]) -> str:
    """Why this regular file must not leave the pod; empty if it may.

    A file with one name was made where it is, or moved there by someone permitted to. A file with several names can be
    a link to a file that the linking user cannot even read, so it must belong to one of ``owners``, or to the owner of
    its directory, if only that owner can create entries in it.
    """
    if file.st_nlink < 2 or file.st_uid in owners:
        return ""
    if file.st_uid == directory.st_uid and not directory.st_mode & stat.S_IWOTH:
        return ""
    return (
        f"is a hard link to a file of user {file.st_uid}, in a directory of user {directory.st_uid}; "
        "podwatch does not send it, because only its owner may decide that"
    )


# -- owners of a checkpoint's files ----------------------------------------------------------------------------------


def owners_of(tree: PinnedTree) -> tuple[int, ...]:
    """Users whose files may have several names, wherever the files are: the training's user, the owners of the
    configured directories, and podwatch. Never root: files of root are judged by their directory. Raises RootReplaced.
    """
    found = {os.geteuid()} if tree.owner is None else {tree.owner, os.geteuid()}
    for root in tree.roots:
        with suppress(FileNotFoundError), tree.directory(root) as fd:
            found.add(os.fstat(fd).st_uid)
    return tuple(sorted(found - {0}))


def check_contents(tree: PinnedTree, contents: "SetContents", owners: Collection[int]) -> None:
    """For a checkpoint that is sent from our own hard links, whose directories do not show the owner: judge each file
    where the trainer wrote it. Raises SetForeign, RootReplaced or OSError."""
    from podwatch.sync.upload.start_child import SetForeign  # only in the daemon: the child starts faster without

    roots = {p.part.name: Path(p.part.path) for p in contents.parts}
    for file in contents.files:
        with tree.parent(roots[file.part] / file.path) as (directory, name):
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if reason := foreign(found, os.fstat(directory), owners):
                raise SetForeign(reason, where=f"{file.part}/{file.path}")
