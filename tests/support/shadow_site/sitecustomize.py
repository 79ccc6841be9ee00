"""With this directory in PYTHONPATH each podwatch that is started compares its decisions: see shadow_ties.py."""

import sys

if "podwatch" in sys.orig_argv and "run" in sys.orig_argv:
    from tests.support import shadow_ties

    shadow_ties.install()
