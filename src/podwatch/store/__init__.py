"""The store: objects, their transfer, and what a run keeps there."""
