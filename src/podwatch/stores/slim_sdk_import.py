"""Keeps b2sdk from importing modules that no store needs. Imported before it; has no effect on modules already
imported.

charset_normalizer guesses text encodings for requests (a store's answers are JSON, or bytes): 3 MiB of a daemon that
has 70. pydantic checks b2sdk's types where it is installed (b2sdk/_internal/types.py supports its absence): 3 MiB and a
tenth of the start of a child, which does not use it otherwise.
"""

import sys
import warnings
from typing import Any

_NEEDLESS = ("chardet", "charset_normalizer", "pydantic")
_modules: dict[str, Any] = sys.modules
_hidden = [name for name in _NEEDLESS if name not in _modules]
for _name in _hidden:
    _modules[_name] = None  # importing it now raises ImportError
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # requests warns that it finds no guesser
        import b2sdk.v3
finally:
    for _name in _hidden:
        del _modules[_name]

__all__ = ["b2sdk"]
