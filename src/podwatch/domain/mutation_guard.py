"""The guard that every deletion, publication, restart and fresh start asks first."""

from collections.abc import Callable
from enum import StrEnum


class Mutation(StrEnum):
    """The kinds of change that podwatch makes outside its own files."""

    DELETE = "delete"
    """Delete or move checkpoints and other files in the trainer's directories."""
    PUBLISH = "publish"
    """Upload, publish, and delete in the store."""
    RESTART = "restart"
    """Stop or start training, and move checkpoints above the resume step to quarantine."""
    FRESH_START = "fresh-start"
    """Start training without a checkpoint, or leave newer checkpoints of an unknown run unused."""


Source = Callable[[Mutation], str]
"""Returns why the mutation is not allowed now; empty if this source allows it. Called often and from any thread, so it
reads immutable values only."""


class MutationGuard:
    """Retention, sync and recovery ask it before they act; each component that can block a mutation adds a source."""

    def __init__(self, *sources: Source) -> None:
        self._sources = list(sources)

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def blocked_reason(self, mutation: Mutation = Mutation.DELETE) -> str:
        """The first reason against ``mutation``; empty if it is allowed. Does not block the thread."""
        return next((reason for source in self._sources if (reason := source(mutation))), "")
