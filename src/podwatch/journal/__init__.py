"""SQLite: events, incidents, intents, uploads, learned values."""

from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.upload_records import UploadedObject

__all__ = ["AsyncJournal", "Journal", "PublishedSave", "UploadedObject"]
