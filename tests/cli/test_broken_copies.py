"""Copies of a store in which something is missing, damaged or not readable: each run is named, with what is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.domain.manifest import Keys
from podwatch.stores.base import AccessDenied
from podwatch.stores.local import LocalStore
from tests.support.past_runs import past_run
from tests.support.strangers import UID, needs_root

pytestmark = pytest.mark.slow

WITHOUT_RIGHTS = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
"""Root that other users' permissions bind."""


@pytest.fixture
def copy(machine):
    path = machine.directory / "copy"
    store = LocalStore(path, writer_id="w")
    for run in ("one", "two", "three"):
        past_run(store, Keys(run), 10, 20)
    return path


def the(path: Path, pattern: str) -> Path:
    (found,) = path.glob(pattern)
    return found


def rows(machine, copy: Path) -> dict[str, dict]:
    listed = machine.podwatch("runs", "list", "--store", f"file://{copy}", "--json")
    assert listed.returncode == 0, listed.stderr
    return {run["run_id"]: run for run in json.loads(listed.stdout)["runs"]}


def test_a_missing_manifest(machine, copy):
    the(copy, "two/podwatch/step_20/*/manifest.json").unlink()
    found = rows(machine, copy)
    assert sorted(found) == ["one", "three", "two"]
    assert found["two"]["problem"] == "it names step 20, whose manifest is not in the store"
    assert found["one"]["problem"] == ""
    there = machine.directory / "there"
    restored = machine.podwatch("runs", "restore", "two", "--store", f"file://{copy}", "--to", str(there))
    assert (restored.returncode, "restored step 10 of two" in restored.stdout) == (0, True)
    assert "skipped: the manifest is not in the store" in restored.stdout


def test_a_truncated_pointer_and_a_truncated_file(machine, copy):
    pointer = copy / "one/podwatch/latest.json"
    pointer.write_bytes(pointer.read_bytes()[:50])
    data = the(copy, "two/podwatch/step_20/*/checkpoint/0.bin")
    data.write_bytes(data.read_bytes()[:50])
    assert "not valid JSON" in rows(machine, copy)["one"]["problem"]
    restored = machine.podwatch(
        "runs", "restore", "two", "--store", f"file://{copy}", "--to", str(machine.directory / "there")
    )
    assert (restored.returncode, "restored step 10 of two" in restored.stdout) == (0, True)
    assert "skipped: step 20: the object is shorter than recorded" in restored.stdout


def test_empty_directories_and_files_of_others(machine, copy):
    (copy / "cut" / "podwatch" / "step_5" / "abc").mkdir(parents=True)
    (copy / "README").write_text("mine")
    (copy / "photos").mkdir()
    (copy / "photos" / "cat").write_text("x")
    os.mkfifo(copy / "one" / "podwatch" / "pipe")
    (copy / "link").symlink_to("/etc")
    with (Path(os.fsdecode(os.fsencode(copy / "one" / "podwatch") + b"/\xff"))).open("w") as file:
        file.write("x")
    assert sorted(rows(machine, copy)) == ["one", "three", "two"]
    listed = machine.podwatch("runs", "list", "--store", f"file://{copy}")
    assert "without any file: cut" in listed.stderr


def test_a_store_that_is_not_there(machine):
    url = f"file://{machine.directory}/nowhere"
    listed = machine.podwatch("runs", "list", "--store", url)
    assert (listed.returncode, f"directory {machine.directory}/nowhere not found" in listed.stderr) == (69, True)
    assert machine.podwatch("runs", "check", "--store", url).returncode == 3


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv takes root's rights away")
def test_what_must_not_be_read_is_named(machine, copy):
    """And nothing else is hidden by it."""
    closed = the(copy, "two/podwatch/step_20/*/checkpoint/0.bin")
    (copy / "lost+found").mkdir()
    for path, mode in ((closed, 0o600), (copy / "three", 0o700), (copy / "lost+found", 0o700)):
        os.chown(path, UID, UID)
        path.chmod(mode)

    def podwatch(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*WITHOUT_RIGHTS, sys.executable, "-m", "podwatch", *arguments, "--store", f"file://{copy}"]
        return subprocess.run(command, capture_output=True, text=True, env=machine.env, check=False, cwd=copy.parent)

    listed = podwatch("runs", "list")
    assert listed.returncode == 1, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:] if line[0] != " "] == ["one", "three", "two"]
    assert "  Permission denied: cannot read three\n" in listed.stdout
    assert f"  Permission denied: cannot read {closed.relative_to(copy)}" in listed.stdout
    checked = podwatch("runs", "check").stdout
    assert "UNKNOWN three: the store refuses access: Permission denied" in checked
    assert "one: " in checked
    assert "note      Permission denied: cannot read two/" in podwatch("runs", "show", "two").stdout
    shown = podwatch("runs", "show", "three")
    assert (shown.returncode, "Permission denied: cannot read three" in shown.stderr) == (69, True)
    restored = podwatch("runs", "restore", "two", "--to", str(machine.directory / "there"))
    assert restored.returncode == 69
    assert "the store refuses access: Permission denied" in restored.stderr
    assert "please report" not in restored.stderr


def test_a_directory_that_disappears_or_fails_is_not_an_empty_one(tmp_path, monkeypatch):
    store = LocalStore(tmp_path, writer_id="w")
    store.put_bytes("run/podwatch/a", b"1")
    walk = os.walk

    def failing(number: int):
        def walked(top, onerror, **options):
            onerror(OSError(number, os.strerror(number), str(tmp_path / "run" / "podwatch" / "b")))
            yield from walk(top, onerror=onerror, **options)

        return walked

    monkeypatch.setattr(os, "walk", failing(2))
    assert [o.key for o in store.list("")] == ["run/podwatch/a"]
    monkeypatch.setattr(os, "walk", failing(13))
    listing = store.list("run/")
    assert next(listing).key == "run/podwatch/a"
    with pytest.raises(AccessDenied, match="cannot read run/podwatch/b"):
        next(listing)
    monkeypatch.setattr(os, "walk", failing(5))
    with pytest.raises(Exception, match="cannot be used: Input/output error"):
        list(store.list(""))
