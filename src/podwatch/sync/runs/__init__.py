"""Whole runs of a store: list, import foreign backups, archive."""
