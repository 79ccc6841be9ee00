"""The way out: one checkpoint is uploaded by a child process of its own, part by part."""
