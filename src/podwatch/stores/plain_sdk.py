"""b2sdk without what no store needs of it. Imported before it; where somebody has imported these already nothing
changes.

charset_normalizer guesses for requests how texts without a charset are encoded (answers of a store are JSON, or bytes):
3 MiB of a daemon that has 70. pydantic checks types for b2sdk where it is installed (b2sdk/_internal/types.py supports
doing without): 3 MiB and a tenth of the start of a child, which has no other use for it.
"""

import sys
import warnings
from typing import Any

_NEEDLESS = ("chardet", "charset_normalizer", "pydantic")
_modules: dict[str, Any] = sys.modules
_hidden = [name for name in _NEEDLESS if name not in _modules]
for _name in _hidden:
    _modules[_name] = None  # importing it now says that it is not installed
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # requests warns that it finds no guesser
        import b2sdk.v3
finally:
    for _name in _hidden:
        del _modules[_name]

__all__ = ["b2sdk"]
