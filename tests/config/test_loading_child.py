"""The settings of a daemon are validated in a process that ends."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.config import loading_child as child
from podwatch.config.last_good import save_last_good
from podwatch.config.loading import load_settings
from podwatch.config.loading_child import load_in_child
from podwatch.config.problems import ConfigurationProblems
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import scrub

pytestmark = pytest.mark.slow

TEXT = """
run_id = "r1"
state_dir = "STATE"
[trainer]
output_dir = "out"
command = ["train", "--api-key", "sesame-0123456789"]
[trainer.env]
NAME = "value"
[gpu]
poll = "3s"
[[hooks]]
name = "one"
on = ["finished"]
command = ["true"]
timeout = "1h"
[controller.providers.rented]
command = ["rent"]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.toml"
    path.write_text(TEXT.replace("STATE", str(tmp_path / "state")))
    path.chmod(0o644)
    return path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


def test_the_same_settings_as_without_a_child(file: Path) -> None:
    environ = environment(PODWATCH_DIRECTORY="/data", PODWATCH_GPU__HOLD="9s")
    overrides = {"gpu.floor": "4GiB", "gpu.inference": [0, 1]}
    there = load_in_child(file, environ, overrides, "")
    here = load_settings(file, environ=environ, overrides=overrides)
    assert there == here
    assert there.settings.trainer.output_dir == Path("/data/out")
    assert there.settings.hooks[0].given == here.settings.hooks[0].given == {"name", "on", "command", "timeout"}
    assert there.settings.model_dump(mode="json") == here.settings.model_dump(mode="json")


def test_its_secrets_are_known_here(file: Path) -> None:
    secret = f"sesame-{os.getpid()}-9876543210"
    file.write_text(file.read_text().replace("sesame-0123456789", secret))
    load_in_child(file, environment(), {}, "")
    assert secret not in scrub(f"failed with {secret}")


def test_every_problem_comes_back(file: Path) -> None:
    file.write_text(file.read_text() + "[gup]\nx = 1\n[log]\nlevel = 'loud'\n")
    with pytest.raises(ConfigurationProblems) as there:
        load_in_child(file, environment(), {}, "")
    with pytest.raises(ConfigurationProblems) as here:
        load_settings(file, environ=environment())
    assert str(there.value) == str(here.value)
    assert there.value.problems == here.value.problems
    assert there.value.exit_code == here.value.exit_code


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_in_child(tmp_path / "none.toml", environment(), {}, "")


def test_the_last_good_copy_is_used_only_at_a_start(file: Path) -> None:
    save_last_good(load_settings(file, environ=environment()))
    file.write_text(file.read_text() + "broken\n")
    assert load_in_child(file, environment(), {}, "", last_good=True).refused
    with pytest.raises(ConfigurationError, match="not valid TOML"):
        load_in_child(file, environment(), {}, "")


@pytest.mark.parametrize("program", ["exit 1", "echo nothing", "kill -9 $$", "sleep 60"])
def test_without_a_child_they_are_loaded_here(
    file: Path, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(child, "SECONDS", 1.0)
    assert load_in_child(file, environment(), {}, "").settings.gpu.poll == 3.0


def test_settings_of_another_version_are_loaded_here(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """podwatch was upgraded: the child's settings may lack what this process uses."""
    older = tuple(key for key in child.known_keys() if key != "gpu.poll")
    monkeypatch.setattr(child, "known_keys", lambda: older)
    here: list[object] = []
    monkeypatch.setattr(child.Request, "load", lambda request, environ: here.append(request) or "loaded here")
    assert load_in_child(file, environment(), {}, "") == "loaded here"
    assert here


def test_what_a_package_prints_does_not_mix_with_the_answer(file: Path) -> None:
    code = """
import sys
from podwatch.config import loading_child as child
load = child.Request.load
child.Request.load = lambda request, environ: print("loud", flush=True) or load(request, environ)
sys.exit(child.main())"""
    asked = pickle.dumps(child.Request(file, {}, "", last_good=False))
    done = subprocess.run([sys.executable, "-c", code], input=asked, capture_output=True, check=True)
    assert pickle.loads(done.stdout)[1].settings.run_id == "r1"
    assert done.stderr == b"loud\n"


def test_the_process_that_asks_does_not_load_what_validates(file: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from podwatch.config.loading_child import load_in_child
loaded = load_in_child(Path({str(file)!r}), os.environ, {{}}, "")
assert loaded.settings.gpu.poll == 3.0
print([name for name in sys.modules if name.startswith("pydantic")])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_copy_is_changed_and_the_original_is_not(file: Path) -> None:
    loaded = load_settings(file, environ=environment())
    changed = loaded.settings.model_copy(update={"mode": "observe"})
    assert (changed.mode, loaded.settings.mode) == ("observe", "act")
    assert replace(changed, mode="act") == loaded.settings
