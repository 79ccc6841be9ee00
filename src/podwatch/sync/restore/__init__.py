"""The way back: a published checkpoint is fetched by a child process, verified and moved into place."""
