"""One table per trainer, one engine, and one inspection per checkpoint, whose answer becomes a record."""
