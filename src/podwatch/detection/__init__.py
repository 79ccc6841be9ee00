"""One file per family of detectors. Each takes its own state and one look; it returns a new state and findings."""
