"""Settings: what may be configured, in which units, where it came from.

A layout or a store is only a name here; ``daemon`` resolves it.
"""
