"""The vocabulary of podwatch: frozen dataclasses and enums, no I/O, no clock, no third-party import.

Every other room speaks in these types. Units are part of the name (``_bytes``, ``_seconds``) or of the docstring.
Two kinds of time occur: *monotonic* seconds (a float that only this boot understands; all logic uses it) and *wall*
seconds since the epoch (display and records only).
"""
