"""A copy of a directory store that an operator made with another tool: it is a backup of the backup, and readable."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from podwatch.domain.lease import Heartbeat
from podwatch.domain.manifest import Keys
from podwatch.stores.local import PRIVATE, LocalStore
from tests.cli.old_store import stored, write_config
from tests.support.past_runs import past_run, tree

pytestmark = pytest.mark.slow

__all__ = ["stored"]

OLD = 1_600_000_000


def with_cp(store: Path, copy: Path) -> None:
    subprocess.run(["cp", "-r", str(store), str(copy)], check=True)


def without_marks(store: Path, copy: Path) -> None:
    """As ``cp -r store/* copy``, or a download of a bucket."""
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns(PRIVATE), copy_function=shutil.copyfile)


def with_tar(store: Path, copy: Path) -> None:
    """Whole seconds only."""
    copy.mkdir()
    archive = copy.parent / "store.tar"
    subprocess.run(["tar", "-C", str(store), "-cf", str(archive), "."], check=True)
    subprocess.run(["tar", "-C", str(copy), "-xf", str(archive)], check=True)


ways = pytest.mark.parametrize("copied", [with_cp, without_marks, with_tar])


def store_of(machine) -> tuple[Path, Path]:
    return machine.directory / "store", machine.directory / "copy"


@ways
def test_everything_that_reads(stored, copied):
    machine, output, _, body = stored
    original, copy = store_of(machine)
    LocalStore(original, writer_id="w", wall=lambda: OLD).put_bytes(Keys("r").heartbeat, beat())
    copied(original, copy)
    url = f"file://{copy}"
    listed = json.loads(machine.podwatch("runs", "list", "--store", url, "--json").stdout)
    assert [(r["run_id"], r["newest_step"], r["saves"]) for r in listed["runs"]] == [("r", 40, 1)]
    checked = machine.podwatch("runs", "check", "--store", url)
    assert checked.returncode == 2
    assert checked.stdout.startswith("CRITICAL r: dead: no heartbeat"), "the heartbeat is as old as in the store"
    shown = json.loads(machine.podwatch("runs", "show", "r", "--store", url, "--json").stdout)
    assert shown["newest_step"] == 40
    there = machine.directory / "there"
    restored = machine.podwatch("runs", "restore", "r", "--store", url, "--to", str(there))
    assert restored.returncode == 0, restored.stderr
    assert body in [path.read_bytes() for path in tree(there).values()]
    config = write_config(machine.directory / "copy.toml", output, copy)
    assert "* step 40" in machine.podwatch("store", "ls", "-c", config).stdout
    verified = machine.podwatch("store", "verify", "-c", config)
    assert verified.returncode == 0, verified.stdout
    assert "sound (every byte read and hashed)" in verified.stdout


def beat() -> bytes:
    return Heartbeat(state="running", phase="training", desired="running", written_wall=OLD).to_bytes()


@ways
def test_damage_is_found_without_the_mark(stored, copied):
    """The size alone would not show it, and a file without the mark was not flushed by podwatch."""
    machine, output, _, _ = stored
    original, copy = store_of(machine)
    copied(original, copy)
    (data,) = copy.glob("r/podwatch/step_40/*/checkpoint/model.bin")
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    config = write_config(machine.directory / "copy.toml", output, copy)
    verified = machine.podwatch("store", "verify", "-c", config)
    assert verified.returncode == 1
    assert "step 40" in verified.stdout
    assert "does not match its recorded hash" in verified.stdout
    there = machine.directory / "there"
    restored = machine.podwatch("runs", "restore", "r", "--store", f"file://{copy}", "--to", str(there))
    assert restored.returncode == 69
    assert "no whole checkpoint" in restored.stderr
    assert not there.exists() or not [n for n in tree(there) if n.endswith("model.bin")]


@pytest.mark.parametrize("copied", [with_cp, with_tar])
def test_the_next_older_one_if_the_newest_is_damaged(machine, copied):
    """Which one is older, the marks tell, although the times of the files are those of the copying."""
    original, copy = store_of(machine)
    keys = Keys("past")
    for step in (10, 20, 30):
        past_run(LocalStore(original, writer_id="w", wall=lambda step=step: OLD + step), keys, step)
    copied(original, copy)
    next(copy.glob("past/podwatch/step_30/*/checkpoint/1.bin")).write_bytes(b"")
    restored = machine.podwatch(
        "runs", "restore", "past", "--store", f"file://{copy}", "--to", str(machine.directory / "there"), "--json"
    )
    assert json.loads(restored.stdout)["step"] == 20, restored.stderr
