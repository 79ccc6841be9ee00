"""Safe access to the operating system: clock, files, process identity, child processes, sd_notify.

Nothing here depends on checkpoints or trainers.
"""
