"""One place that says whether podwatch may delete, publish, restart or start from nothing now."""

from collections.abc import Callable
from enum import StrEnum


class Mutation(StrEnum):
    """What podwatch does to things that are not its own."""

    DELETE = "delete"
    """Remove or move checkpoints and what else is in the trainer's directories."""
    PUBLISH = "publish"
    """Upload, publish, and delete in the store."""
    RESTART = "restart"
    """Stop or start training, and move to quarantine what is ahead of the step it starts from."""
    FRESH_START = "fresh-start"
    """Start training without a checkpoint, or leave newer checkpoints of an unknown run unused."""


Source = Callable[[Mutation], str]
"""Why this must not be done now; empty where this source has nothing against it. Called often, from any thread: it
reads frozen values only."""


class MutationGuard:
    """Retention, sync and recovery ask it before they act; whoever knows an obstacle adds a source."""

    def __init__(self, *sources: Source) -> None:
        self._sources = list(sources)

    def add(self, source: Source) -> None:
        self._sources.append(source)

    def blocked_reason(self, mutation: Mutation = Mutation.DELETE) -> str:
        """The first reason against it; empty where it is allowed. Never blocks."""
        return next((reason for source in self._sources if (reason := source(mutation))), "")
