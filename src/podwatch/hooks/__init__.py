"""Commands of the operator that run after an event, or in `podwatch check`: children with a time limit.

Knows nothing of recovery, of the trainer or of detection: app/hooks.py joins them.
"""
