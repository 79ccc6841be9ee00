"""Judges files with several names (hard links) by their owner and the directory in which they were found."""

import os
import stat
from collections.abc import Collection


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
