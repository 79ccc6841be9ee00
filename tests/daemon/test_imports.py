"""What the daemon does not load: each module costs memory on a pod for as long as the run lasts."""

import subprocess
import sys

from podwatch.daemon import init, variables_of_own_processes

RARE = (
    "podwatch.daemon.init",
    "podwatch.reporting.page",
    "podwatch.sync.runs.bootstrap",
    "podwatch.sync.syncer",
    "podwatch.sync.restore.restore",
    "podwatch.sync.upload.artifacts",
    "pydantic",
    "pydantic_settings",
    "xml.etree.ElementTree",
    "tarfile",
    "difflib",
    "starlette.applications",
    "b2sdk",
    "requests",
    "wandb",
    "rich",
)
"""init, what bootstrap needs, what only a store needs, what validates settings, parsers of other
stores' answers, archives of incidents, suggestions for misspelt settings, error pages, SDKs."""


def test_what_few_runs_need_is_imported_where_it_is_used() -> None:
    code = f"import sys, podwatch.daemon.daemon\nprint([name for name in {RARE!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_init_and_the_daemon_name_their_variables_alike() -> None:
    """init runs as a file of its own and cannot import the names."""
    shared = {name for name in vars(variables_of_own_processes) if name.isupper()} & set(vars(init))
    assert shared == {"UNDER_INIT", "JOB_PIPE", "JOB_PROCESS", "SILENT_SECONDS"}
    assert all(getattr(init, name) == getattr(variables_of_own_processes, name) for name in shared)
