"""Find, start, adopt and stop the trainer; the keeper that outlives podwatch."""
