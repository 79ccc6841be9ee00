"""One file per family of detectors. Each takes its own small state and what was observed, and returns both anew."""
