"""What happened, in one SQLite file: events, incidents, learned values."""

from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal

__all__ = ["AsyncJournal", "Journal"]
