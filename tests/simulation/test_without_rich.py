"""The demo prints its lines with and without rich, which only colours them."""

import os
import pty
import subprocess
import sys

import pytest

SCREEN = """
import sys
if sys.argv[1] == "without":
    sys.modules["rich"] = None
from podwatch.simulation.verify import Screen
Screen().say("demo", "a fault", "fault")
"""


@pytest.mark.parametrize("rich", ["with", "without"])
def test_the_demo_prints_its_lines_without_rich_too(rich: str) -> None:
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm-256color"}
    subprocess.run([sys.executable, "-c", SCREEN, rich], stdout=theirs, check=True, env=environ)
    os.close(theirs)
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert "a fault" in said
    assert ("\x1b[" in said) is (rich == "with")
