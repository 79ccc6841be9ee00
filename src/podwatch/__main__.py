"""``python -m podwatch`` is the ``podwatch`` command."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current directory: what is there is none of ours

from podwatch.cli import main

if __name__ == "__main__":
    main()
