"""The daemon: builds its components, and runs startup, main loop and shutdown.

``app`` is the lifecycle on one page; ``init`` is the stdlib-only parent for PID 1 and ``--detach``.
"""
