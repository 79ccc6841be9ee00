"""Pods made of numbers: snapshots of runs on an injected clock, healthy with all their oddities, or struck by a fault.

``world.World`` holds what is true at the moment and what each sensor last saw of it; *pieces* (generators that yield
seconds) change it. ``healthy`` are the pieces of a run that works, ``oddities`` what happens beside it without harm,
``deaths`` what ends it, ``shapes`` the kinds of pod, ``watching`` turns the detectors over them. Everything is seeded
and reads no clock, so that a failure is a seed.
"""
