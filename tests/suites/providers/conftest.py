"""The provider commands as ``podwatch controller`` runs them: processes with JSON on stdin and stdout, the vendor's own
client where it can be installed, and a provider on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.clouds import Cloud, RunPodCloud, VastCloud

ROOT = Path(__file__).parents[3]
PROGRAMS = ROOT / "examples" / "providers"
VASTAI = ROOT / ".venv-providers" / "bin" / "vastai"
RUN, LABEL = "run1", "podwatch:run1:7"


@dataclass
class Command:
    """One provider command. ``environment`` is all that it has of this process."""

    program: str
    environment: dict[str, str]
    config: Path
    errors: str = ""
    seconds: str = "60"
    more: dict[str, str] = field(default_factory=dict)

    def run(self, verb: str, request: object, raw: bool = False) -> tuple[int, Any]:
        """The exit code, and what came on stdout."""
        done = subprocess.run(
            [sys.executable, str(PROGRAMS / self.program), verb], input=json.dumps(request), text=True,
            capture_output=True, timeout=180,
            env={**self.environment, "PODWATCH_PROVIDER_SECONDS": self.seconds, **self.more},
        )  # fmt: skip
        self.errors = done.stderr
        assert "Traceback" not in self.errors, self.errors
        assert bool(done.stdout) == (done.returncode == 0), (done.stdout, self.errors)
        return done.returncode, done.stdout if raw or not done.stdout else json.loads(done.stdout)

    def list(self, run: str = RUN) -> tuple[int, Any]:
        return self.run("list", {"version": 1, "run_id": run})

    def create(self, price: float = 1.0, generation: int = 7, **environment: str) -> tuple[int, Any]:
        label = f"podwatch:{RUN}:{generation}"
        return self.run(
            "create",
            {"version": 1, "run_id": RUN, "generation": generation, "label": label, "max_price_per_hour": price,
             "environment": environment},
        )  # fmt: skip

    def destroy(self, number: str, label: str = LABEL) -> tuple[int, Any]:
        return self.run("destroy", {"version": 1, "id": number, "label": label})


def _environment(home: Path) -> dict[str, str]:
    home.mkdir()
    return {"PATH": f"{VASTAI.parent}:{os.environ['PATH']}", "HOME": str(home), "LC_ALL": "C.UTF-8"}


@pytest.fixture
def vast_cloud() -> Iterator[VastCloud]:
    with VastCloud() as cloud:
        assert isinstance(cloud, VastCloud)
        yield cloud


@pytest.fixture
def vast(vast_cloud: VastCloud, tmp_path: Path) -> Command:
    if not VASTAI.exists():
        pytest.skip("vastai cannot be installed here (make test-providers tries it): the Vast.ai command is not tried")
    config = tmp_path / "vast.toml"
    (tmp_path / "start.sh").write_text("#!/bin/sh\nset -e\nexec podwatch run\n")
    config.write_text(
        'query = "gpu_name=RTX_4090 num_gpus=2"\nimage = "img"\ndisk_gb = 100\nonstart = "start.sh"\n'
        'pass = ["WANDB_API_KEY", "B2_APPLICATION_KEY=POD_B2_KEY"]\n[environment]\nPOD_RUN = "run1"\n'
    )
    own = _environment(tmp_path / "home") | _keys()
    return Command(
        "vast.py", own | {"VAST_URL": vast_cloud.url, "VAST_API_KEY": Cloud.KEY, "VAST_CONFIG": str(config)},
        config,
    )  # fmt: skip


@pytest.fixture
def runpod_cloud() -> Iterator[RunPodCloud]:
    with RunPodCloud() as cloud:
        assert isinstance(cloud, RunPodCloud)
        yield cloud


@pytest.fixture
def runpod(runpod_cloud: RunPodCloud, tmp_path: Path) -> Command:
    config = tmp_path / "runpod.toml"
    config.write_text(
        'gpus = ["NVIDIA GeForce RTX 4090", "NVIDIA L40S"]\ngpu_count = 2\nimage = "img"\ndisk_gb = 100\n'
        'pass = ["WANDB_API_KEY", "B2_APPLICATION_KEY=POD_B2_KEY"]\n[environment]\nPOD_RUN = "run1"\n'
    )
    own = _environment(tmp_path / "home") | _keys()
    url = f"{runpod_cloud.url}/v2"
    return Command(
        "runpod.py", own | {"RUNPOD_API_URL": url, "RUNPOD_API_KEY": Cloud.KEY, "RUNPOD_CONFIG": str(config)},
        config,
    )  # fmt: skip


def _keys() -> dict[str, str]:
    """The controller's own key of the store, which must not reach a pod, and those that the configuration names."""
    return {"B2_APPLICATION_KEY": "the-controllers-own", "POD_B2_KEY": "pod-key", "WANDB_API_KEY": "wandb key"}
