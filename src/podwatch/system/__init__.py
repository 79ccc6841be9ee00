"""The operating system, made safe: clock, files, process identity, child processes, sd_notify.

Nothing here knows what a checkpoint or a trainer is.
"""
