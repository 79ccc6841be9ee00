"""Impure readers, each with a deadline and a thread of its own where a call can hang.

A sensor never raises and never blocks its caller: ``latest()`` returns the newest Reading, which turns BLIND by itself
when nothing came for longer than its deadline.
"""
