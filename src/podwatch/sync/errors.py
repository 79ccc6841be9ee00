"""Errors that the child processes raise too: separate, so that a child need not load the daemon's modules."""

from podwatch.domain.errors import IntegrityError


class SaveGone(IntegrityError):  # noqa: N818
    """An object that a pointer or manifest names is not in the store (any more)."""
