"""Drivers: the only test modules that call the inside of the product, one for each asset that outlives it.

An asset is a body of tests worth more than the code it tests. Its tests and support modules speak the words of their
driver and import nothing of podwatch. Where a room of the product is rewritten, its driver is, and nothing else.

- ``detection``: simulated pods (`tests/support/pods`), recorded nights (`tests/detection/nights`), the pod whose every
  part a test changes (`tests/detection/looks.py`). Snapshots in, findings out.
- ``paths``: attacks on paths (`tests/paths`). The table of all operations on paths that a training user controls.
- ``checkpoints``: real and made checkpoints, write orders, hostile directories (`tests/checkpoints`,
  `tests/support/golden.py`, `tests/support/layout_makers`). Directories in, verdicts out.

A driver re-exports types that every edition keeps (the fields of a snapshot, process roles, kinds of findings): tests
take them from the driver as well, so that ``grep 'import podwatch\\|from podwatch'`` shows what hangs on the inside.
"""
