"""From the store to where the trainer looks for it: choose, fetch into staging, inspect there, rename into place."""
