"""Recordings: what podwatch observed, written to disk, and replayed through the detectors."""
