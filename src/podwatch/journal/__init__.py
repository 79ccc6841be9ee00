"""SQLite: events, incidents, intents, uploads, learned values; and the run record beside output_dir."""

from podwatch.domain.stored_checkpoint import PublishedSave
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.journal.run_record_file import load_run_record, save_run_record
from podwatch.journal.upload_records import UploadedObject

__all__ = ["AsyncJournal", "Journal", "PublishedSave", "UploadedObject", "load_run_record", "save_run_record"]
