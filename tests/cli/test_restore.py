"""``podwatch restore`` as a real process, from a real local store, onto a pod that has nothing yet."""

import json
import os

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import make_layout
from podwatch.client.find_daemon import own_endpoint, write_endpoint
from podwatch.config.settings import Settings
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.domain.run_state import RunState
from podwatch.stores.local import LocalStore
from podwatch.system.clock import SystemClock
from podwatch.system.own_directories import Workspace
from tests.support.put_file import put_file

pytestmark = pytest.mark.slow

PART_SIZE = 5_000_000


def settings_of(output, store):
    return {
        "run_id": "r",
        "state_dir": str(output.parent / "state"),
        "trainer": {"layout": "custom", "output_dir": str(output), "command": ["python", "train.py"]},
        "checkpoints": {"custom": {"step_dir": "step_{step}", "required": ["model.bin"]}},
        "sync": {"store": f"file://{store}"},
    }


def write_config(path, output, store, run_id="r"):
    path.write_text(
        f'run_id = "{run_id}"\nstate_dir = "{output.parent}/state"\n[trainer]\nlayout = "custom"\n'
        f'output_dir = "{output}"\ncommand = ["python", "train.py"]\n[checkpoints.custom]\nstep_dir = "step_{{step}}"\n'
        f'required = ["model.bin"]\n[checkpoints]\nsettle_weak = 0\n[sync]\nstore = "file://{store}"\n'
    )
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def stored(machine):
    """Step 40 in a local store, as another pod would have left it; returns (machine, output, config, bytes)."""
    store_path, source = machine.directory / "store", machine.directory / "elsewhere" / "out"
    body = os.urandom(PART_SIZE + 1000)
    (source / "step_40").mkdir(parents=True)
    (source / "step_40" / "model.bin").write_bytes(body)
    store_path.mkdir()
    catalogue = Catalogue(
        make_layout(Settings.model_validate(settings_of(source, store_path))), SystemClock(), settle=0, settle_weak=0
    )
    catalogue.rescan()
    (found,) = catalogue.rescan()
    store, keys, files = LocalStore(store_path, writer_id="w"), Keys("r"), []
    for entry in catalogue.contents(40).files:
        name = f"{entry.part}/{entry.path}"
        with (source / "step_40" / entry.path).open("rb") as file:
            put = put_file(store, keys.data(40, found.save_id, name), file, entry.size, part_size=PART_SIZE)
        files.append(
            ManifestFile(name, entry.part, entry.size, entry.mtime_ns, 0o644, put.key, put.file_id, put.parts_sha1)
        )
    now = "2026-01-31T03:00:00Z"
    manifest = Manifest(
        "r",
        "line",
        40,
        found.save_id,
        "custom",
        now,
        "w",
        PART_SIZE,
        len(body),
        tuple(files),
        train_command=("rm", "-rf"),
    )
    data = manifest.to_bytes()
    key = keys.manifest(40, found.save_id)
    store.put_bytes(key, data)
    pointer = Pointer(
        1, 1, "r", "line", 40, "w", now, found.save_id, key, "", sha1_hex(data), len(data), len(body), "custom"
    )
    store.put_bytes(keys.latest, pointer.to_bytes())
    store.close()
    output = machine.directory / "pod" / "outputs"
    return machine, output, write_config(machine.directory / "podwatch.toml", output, store_path), body


def test_onto_a_fresh_pod(stored):
    machine, output, config, body = stored
    result = machine.podwatch("restore", "-c", config)
    assert result.returncode == 0, result.stderr
    assert "restored step 40" in result.stdout
    assert "training command: rm -rf" in result.stdout
    assert (output / "step_40" / "model.bin").read_bytes() == body
    record = json.loads((machine.directory / "pod" / "state" / "r" / "run.json").read_text())
    assert (record["run_id"], record["lineage"]["id"]) == ("r", "line")
    again = json.loads(machine.podwatch("restore", "-c", config, "--json").stdout)
    assert (again["step"], again["downloaded_bytes"]) == (40, 0)
    sets = json.loads(machine.podwatch("checkpoints", "-c", config, "--json").stdout)["sets"]
    assert [(s["step"], s["stored"]) for s in sets] == [(40, True)]


def test_to_a_directory_touches_nothing_else(stored):
    machine, output, config, body = stored
    result = machine.podwatch("restore", "-c", config, "--to", str(machine.directory / "there"))
    assert result.returncode == 0, result.stderr
    assert [p.read_bytes() for p in (machine.directory / "there").rglob("model.bin")] == [body]
    assert not output.exists()


def test_a_step_that_is_not_there(stored):
    machine, _, config, _ = stored
    result = machine.podwatch("restore", "-c", config, "--step", "41")
    assert result.returncode == 69
    assert "no whole checkpoint of step 41 is in the store" in result.stderr


def test_a_damaged_object_is_not_restored(stored):
    machine, output, config, body = stored
    (data,) = (machine.directory / "store").rglob("model.bin")
    data.chmod(0o600)
    data.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    result = machine.podwatch("restore", "-c", config)
    assert result.returncode == 69
    assert not (output / "step_40").exists()
    assert not (machine.directory / "pod" / "state" / "r" / "run.json").exists()


def test_beside_a_daemon_only_elsewhere(stored):
    machine, output, config, _ = stored
    (machine.runtime / "r").mkdir()
    write_endpoint(machine.runtime / "r", own_endpoint("r", started_wall=0.0))
    result = machine.podwatch("restore", "-c", config)
    assert result.returncode == 75
    assert "--to DIR" in result.stderr
    assert not output.exists()
    assert machine.podwatch("restore", "-c", config, "--to", str(machine.directory / "there")).returncode == 0


def test_a_directory_of_another_run_is_refused(stored):
    machine, output, config, _ = stored
    copy = Workspace(output).probe().run_copy
    copy.write_bytes(RunState("other", counter=1).to_bytes())
    result = machine.podwatch("restore", "-c", config)
    assert result.returncode == 78
    assert "belongs to run 'other'" in result.stderr


def test_checkpoints_of_nobody_are_not_claimed(stored):
    machine, output, config, _ = stored
    (output / "step_3").mkdir(parents=True)
    (output / "step_3" / "model.bin").write_bytes(b"x")
    result = machine.podwatch("restore", "-c", config)
    assert result.returncode == 0, result.stderr
    assert "--adopt-existing" in result.stdout
    assert not (machine.directory / "pod" / "state" / "r" / "run.json").exists()


def test_no_store_is_one_clear_line(machine):
    config = machine.directory / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\nstate_dir = "{machine.directory}/s"\ntrainer.output_dir = "{machine.directory}/o"\n'
    )
    config.chmod(0o600)
    result = machine.podwatch("restore", "-c", str(config))
    assert result.returncode == 78
    assert "no store is configured" in result.stderr
