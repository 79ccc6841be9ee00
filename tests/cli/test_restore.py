"""``podwatch restore`` as a real process, from a real local store, onto a pod that has nothing yet."""

import json
import os

import pytest

from podwatch.domain.run_state import RunState
from podwatch.store.keys import RunKeys
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.system.endpoint import own_endpoint, write_endpoint
from podwatch.system.own_directories import Workspace
from tests.support.stored_save import Shelf

pytestmark = pytest.mark.slow

PART_SIZE = 5_000_000


def write_config(path, output, store, run_id="r"):
    path.write_text(
        f'run_id = "{run_id}"\nstate_dir = "{output.parent}/state"\n[trainer]\nlayout = "custom"\n'
        f'output_dir = "{output}"\ncommand = ["python", "train.py"]\n[checkpoints.custom]\nparts = "step_{{step}}"\n'
        f'require = ["model.bin"]\n[sync]\nstore = "file://{store}"\n'
    )
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def shelf(machine) -> Shelf:
    """Of the store of run r."""
    (machine.directory / "store").mkdir()
    return Shelf(
        lambda: DirectoryObjects(machine.directory / "store"), RunKeys("r"), lineage="line", piece_size=PART_SIZE
    )


@pytest.fixture
def stored(machine, shelf):
    """Step 40 in a directory, as another pod would have left it; returns (machine, output, config, bytes)."""
    body, source = os.urandom(PART_SIZE + 1000), machine.directory / "elsewhere"
    source.mkdir()
    (source / "model.bin").write_bytes(body)
    shelf.save(40, {"checkpoint": source}, train_command=("rm", "-rf"))
    output = machine.directory / "pod" / "outputs"
    return machine, output, write_config(machine.directory / "podwatch.toml", output, machine.directory / "store"), body


def test_onto_a_fresh_pod(stored):
    machine, output, config, body = stored
    result = machine.podwatch("restore", "-c", config)
    assert result.returncode == 0, result.stderr
    assert "restored step 40" in result.stdout
    assert "training command: rm -rf" in result.stdout
    assert (output / "step_40" / "model.bin").read_bytes() == body
    record = json.loads((machine.directory / "pod" / "state" / "r" / "run.json").read_text())
    assert (record["run_id"], [start["branch"] for start in record["starts"]]) == ("r", ["line"])
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
    (data,) = (machine.directory / "store").rglob("model.bin.piece-00001")
    data.write_bytes(data.read_bytes()[:-1] + bytes([body[-1] ^ 1]))
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


def test_one_that_was_stored_damaged_is_passed_over_unless_it_is_named(stored, shelf):
    machine, output, config, _ = stored
    source = machine.directory / "short"
    source.mkdir()
    (source / "other.bin").write_bytes(b"x")
    shelf.save(50, {"checkpoint": source})
    report = json.loads(machine.podwatch("restore", "-c", config, "--json").stdout)
    assert (report["step"], report["doubt"], len(report["refused"])) == (40, "", 1)
    assert "model.bin is missing" in report["refused"][0]
    assert not (output / "step_50").exists()
    named = machine.podwatch("restore", "-c", config, "--step", "50")
    assert named.returncode == 0, named.stderr
    assert "DAMAGED, restored because you named it" in named.stdout
    assert (output / "step_50" / "other.bin").read_bytes() == b"x"


def test_a_store_that_is_not_mounted_is_no_empty_one(stored):
    machine, _, config, _ = stored
    (machine.directory / "store").rename(machine.directory / "away")
    for words in (("restore",), ("store", "ls"), ("store", "verify")):
        result = machine.podwatch(*words, "-c", config)
        assert (result.returncode, result.stderr.count("\n")) == (69, 1), result.stderr
        assert "does not exist" in result.stderr
        assert "mounted" in result.stderr


def test_ids_of_the_wandb_run_are_known_to_the_pod(stored, shelf):
    machine, _, config, _ = stored
    source = machine.directory / "elsewhere"
    shelf.save(50, {"checkpoint": source}, wandb={"shared": "abc123", "trainer": "--not-an-id"})
    assert machine.podwatch("restore", "-c", config).returncode == 0
    record = json.loads((machine.directory / "pod" / "state" / "r" / "run.json").read_text())
    assert record["wandb"] == {"shared": "abc123"}
