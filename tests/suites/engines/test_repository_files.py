"""The files of .github, by the schemas that check-jsonschema ships for them."""

import subprocess
import sys
from pathlib import Path

import pytest

GITHUB = Path(__file__).parents[3] / ".github"
TOOL = Path(sys.executable).with_name("check-jsonschema")
SCHEMAS = {
    "workflows/*.yml": "vendor.github-workflows",
    "ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    "ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "dependabot.yml": "vendor.dependabot",
}


@pytest.mark.skipif(not TOOL.exists(), reason="needs the validators: make test-engines")
@pytest.mark.parametrize("pattern", SCHEMAS)
def test_github_can_read_each(pattern: str) -> None:
    found = sorted(GITHUB.glob(pattern))
    assert found
    done = subprocess.run([TOOL, "--builtin-schema", SCHEMAS[pattern], *found], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
