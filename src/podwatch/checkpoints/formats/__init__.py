"""Structural checks of checkpoint files, one module per format: standard library only, nothing of torch is imported.

They read headers, tails and indexes, never whole files, so a 47 GB set costs milliseconds. They find what is missing,
truncated or half written; they cannot find flipped bits in tensor data: the hashes taken at upload do that.
"""
