"""``podwatch store`` as a real process on a real directory."""

import json

import pytest

from tests.cli.test_restore import shelf, stored

pytestmark = pytest.mark.slow

__all__ = ["shelf", "stored"]


def test_ls_and_verify(stored):
    machine, _, config, body = stored
    listed = machine.podwatch("store", "ls", "-c", config)
    assert listed.returncode == 0, listed.stderr
    assert "* step 40" in listed.stdout
    assert "1 files" in listed.stdout
    document = json.loads(machine.podwatch("store", "ls", "-c", config, "--json").stdout)
    (save,) = document["saves"]
    assert (save["step"], save["named"], save["total_bytes"], save["problem"]) == (40, True, len(body), "")
    assert save["age_seconds"] < 600
    deep = machine.podwatch("store", "verify", "--deep", "-c", config)
    assert (deep.returncode, "every byte read and hashed" in deep.stdout) == (0, True)


def test_verify_says_what_is_damaged(stored, shelf):
    machine, _, config, _ = stored
    shelf.damage(40, "piece-00001")
    shallow = machine.podwatch("store", "verify", "-c", config)
    assert (shallow.returncode, "by size only" in shallow.stdout) == (0, True)
    deep = machine.podwatch("store", "verify", "--deep", "--step", "40", "-c", config)
    assert deep.returncode == 1
    assert "checkpoint/model.bin.piece-00001 does not match its recorded hash" in deep.stdout
    missing = machine.podwatch("store", "verify", "--step", "41", "-c", config)
    assert missing.returncode != 0
    assert "step 41 is not in the store" in missing.stderr
    shelf.remove(40, "piece-00001")
    found = json.loads(machine.podwatch("store", "verify", "-c", config, "--json").stdout)["saves"]
    assert [(s["step"], s["sound"]) for s in found] == [(40, False)]
    assert "piece-00001 is missing" in found[0]["reasons"][0]


def test_exported_weights_are_verified_too(stored, shelf):
    machine, _, config, _ = stored
    shelf.exports(40, "weights", {"a.safetensors": b"w" * 1000})
    assert "and exported weights" in machine.podwatch("store", "ls", "-c", config).stdout
    assert machine.podwatch("store", "verify", "--deep", "-c", config).returncode == 0
    (weights,) = (machine.directory / "store").rglob("a.safetensors")
    weights.write_bytes(b"v" * 1000)
    deep = machine.podwatch("store", "verify", "--deep", "-c", config)
    assert deep.returncode == 1
    assert "sound" in deep.stdout
    assert "exported weights DAMAGED" in deep.stdout


def test_documents_that_cannot_be_used_are_named(stored, shelf):
    machine, _, config, _ = stored
    (newest,) = (machine.directory / "store").rglob("pointers/*")
    newest.write_text("[]")
    listed = json.loads(machine.podwatch("store", "ls", "-c", config, "--json").stdout)
    assert "pointers/" in listed["pointer_problem"]
    assert [s["named"] for s in listed["saves"]] == [False]
    assert machine.podwatch("store", "verify", "-c", config).returncode == 1
