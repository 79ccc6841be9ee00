"""Settings: their models, units and sources.

A layout or a store is only a name here; ``daemon`` resolves it.
"""
