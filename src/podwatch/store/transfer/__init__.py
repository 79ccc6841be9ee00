"""The child process that sends and fetches the pieces of checkpoints."""
