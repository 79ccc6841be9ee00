"""Step 40 in a directory as the old layout of the store has it, for the commands that still read that one."""

import os

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.manifest import Keys, Manifest, ManifestFile, Pointer, sha1_hex
from podwatch.stores.local import LocalStore
from podwatch.system.clock import SystemClock
from tests.support.put_file import put_file

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
