"""Runs in a store: what it holds of each, whether each is well, and what an archive or a bare pod does with it."""
