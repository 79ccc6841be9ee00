"""Errors that the children raise, too: apart, so that a child need not load what the daemon needs."""

from podwatch.domain.errors import IntegrityError


class SaveGone(IntegrityError):  # noqa: N818
    """What a pointer or manifest names is not in the store (any more)."""
