"""What the log library must not bring with it."""

import subprocess
import sys

CODE = """
import sys
import podwatch.reporting.logging
print(sorted(m for m in sys.modules if m.partition(".")[0] == "rich"))
import rich.table
print(rich.table.Table.__name__)
"""


def test_logging_does_not_load_rich_and_leaves_it_usable() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "Table"]
