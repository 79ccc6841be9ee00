"""The types that all other packages share: frozen dataclasses and enums, no I/O, no clock, no third-party import.

Units are part of the name (``_bytes``, ``_seconds``) or of the docstring. Two kinds of time occur: *monotonic* seconds
(a float that is valid only during this boot; all logic uses it) and *wall* seconds since the epoch (display and records
only).
"""
