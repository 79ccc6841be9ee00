"""How many examples Hypothesis tries: a quarter in the default suite, all of them in ``make test-slow``."""

import os

FULL = bool(os.environ.get("HYPOTHESIS_PROFILE"))
USUAL = 100


def examples(most: int = USUAL) -> int:
    return most if FULL else max(10, most // 4)
