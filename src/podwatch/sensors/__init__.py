"""Sensors: they read the pod. Each has a deadline, and its own thread where a call can hang.

A sensor never raises and never blocks its caller: ``latest()`` returns the newest Reading, which becomes BLIND when
nothing arrived for longer than its deadline.
"""
