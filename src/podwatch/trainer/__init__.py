"""Find, start, adopt and stop the trainer; the supervisor that outlives podwatch."""
