"""``podwatch store`` as a real process on a real local store."""

import io
import json

import pytest

from podwatch.domain.manifest import Keys
from podwatch.stores.local import LocalStore
from tests.cli.test_restore import PART_SIZE, stored
from tests.support.put_file import put_file

pytestmark = pytest.mark.slow

__all__ = ["stored"]


def test_ls_and_verify(stored):
    machine, _, config, body = stored
    listed = machine.podwatch("store", "ls", "-c", config)
    assert listed.returncode == 0, listed.stderr
    assert "* step 40" in listed.stdout
    assert "1 files" in listed.stdout or "1 file" in listed.stdout
    document = json.loads(machine.podwatch("store", "ls", "-c", config, "--json").stdout)
    assert [(s["step"], s["named"], s["total_bytes"]) for s in document["saves"]] == [(40, True, len(body))]
    deep = machine.podwatch("store", "verify", "--deep", "-c", config)
    assert (deep.returncode, "sound" in deep.stdout) == (0, True)


def test_verify_says_what_is_damaged(stored):
    machine, _, config, body = stored
    store = LocalStore(machine.directory / "store", writer_id="w")
    key = next(o.key for o in store.list(Keys("r").step(40)) if o.key.endswith("model.bin"))
    put_file(store, key, io.BytesIO(body[:-1] + b"!"), len(body), part_size=PART_SIZE)
    assert machine.podwatch("store", "verify", "-c", config).returncode == 0, "sizes cannot tell"
    deep = machine.podwatch("store", "verify", "--deep", "--step", "40", "-c", config)
    assert deep.returncode == 1
    assert "part 2 does not match its recorded hash" in deep.stdout
    missing = machine.podwatch("store", "verify", "--step", "41", "-c", config)
    assert missing.returncode != 0
    assert "step 41 is not in the store" in missing.stderr


def test_sweep_finds_nothing_young(stored):
    machine, _, config, _ = stored
    store = LocalStore(machine.directory / "store", writer_id="w")
    store.put_bytes(Keys("r").data(50, "save", "p/a"), b"just now")
    result = machine.podwatch("store", "sweep", "-c", config)
    assert (result.returncode, result.stdout) == (0, "nothing to sweep\n")
    old = LocalStore(machine.directory / "store", writer_id="w", wall=lambda: 1_700_000_000.0)
    old.put_bytes(Keys("r").data(51, "save", "p/a"), b"long ago")
    dry = machine.podwatch("store", "sweep", "--dry-run", "-c", config)
    assert "would remove save r/podwatch/step_51/save/: 1 objects without a manifest" in dry.stdout
    assert "removed save" in machine.podwatch("store", "sweep", "-c", config).stdout
    assert [o.key for o in store.list("r/podwatch/step_5")] == ["r/podwatch/step_50/save/p/a"]
