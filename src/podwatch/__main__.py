"""``python -m podwatch`` is the ``podwatch`` command."""

from podwatch.cli import main

if __name__ == "__main__":
    main()
