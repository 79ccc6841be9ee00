"""Finding, starting, adopting and stopping the trainer; the keeper that outlives podwatch."""
