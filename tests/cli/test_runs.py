"""``podwatch runs`` as real processes on a real local store."""

import json

import pytest

from podwatch.domain.account_document import AccountTotals, MoneyDocument
from podwatch.store.keys import RunKeys
from podwatch.system.files import FileLock
from tests.support.stored_runs import aged, directory_of, past_run, put_beat

pytestmark = pytest.mark.slow

PAST = RunKeys("past")


@pytest.fixture
def config(machine) -> str:
    path = machine.directory / "podwatch.toml"
    path.write_text(
        f'run_id = "r"\nstate_dir = "{machine.directory}/state"\n[trainer]\nlayout = "custom"\noutput_dir = '
        f'"{machine.directory}/out"\ncommand = ["true"]\n[checkpoints.custom]\nparts = "step_{{step}}"\nrequire = '
        f'["m"]\n[sync]\nstore = "file://{machine.directory}/store"\n'
    )
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def store(machine):
    """A run that is three days old, and one of today."""
    made = directory_of(machine.directory / "store")
    past_run(made, PAST, 10, 20, 30)
    aged(made.root, 3)
    past_run(made, RunKeys("r"), 40)
    return made


def test_list(machine, store, config):
    shown = machine.podwatch("runs", "list", "-c", config)
    assert shown.returncode == 0, shown.stderr
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80
    past, mine = (next(x for x in shown.stdout.splitlines() if x.startswith(n)) for n in ("past", "r "))
    assert past.split()[:3] == ["past", "30", "3"]
    assert mine.split()[:3] == ["r", "40", "1"]
    document = json.loads(machine.podwatch("runs", "list", "-c", config, "--json").stdout)
    runs = {r["run_id"]: r for r in document["runs"]}
    assert (runs["r"]["newest_step"], runs["r"]["saves"]) == (40, 1)
    assert runs["r"]["size_bytes"] > 250
    url = f"file://{machine.directory}/store"
    listed = json.loads(machine.podwatch("runs", "list", "--store", url, "--json").stdout)
    assert [(r["run_id"], r["newest_step"]) for r in listed["runs"]] == [("past", 30), ("r", 40)]
    named = machine.podwatch("runs", "show", "nothing", "--store", url)
    assert f"`podwatch runs list --store {url}`" in named.stderr, "what works without a configuration"


def test_a_directory_that_is_not_there_is_no_empty_store(machine, config):
    for words in (("-c", config), ("--store", f"file://{machine.directory}/nosuch")):
        done = machine.podwatch("runs", "list", *words)
        assert (done.returncode, "not found" in done.stderr) == (69, True), done.stderr


def test_archive(machine, store, config):
    state = machine.directory / "state" / "past"
    state.mkdir(parents=True)
    folder = store.root / PAST.root / "step_10"
    dry = machine.podwatch("runs", "archive", "past", "--dry-run", "-c", config)
    assert (dry.returncode, dry.stdout.count("would delete")) == (0, 2), dry.stderr
    asked = machine.podwatch("runs", "archive", "past", "-c", config)
    assert (asked.returncode, "--yes" in asked.stderr) == (64, True)
    with FileLock(state / "guard.lock"):
        guarded = machine.podwatch("runs", "archive", "past", "--yes", "-c", config)
    assert (guarded.returncode, "already held by" in guarded.stderr) == (75, True)
    assert folder.exists()
    done = json.loads(machine.podwatch("runs", "archive", "past", "--yes", "--json", "-c", config).stdout)
    assert [(s["step"], s["stays"]) for s in done["saves"]] == [(10, False), (20, False), (30, True)]
    assert not folder.exists()
    assert "archived" in machine.podwatch("runs", "list", "-c", config).stdout
    again = machine.podwatch("runs", "archive", "past", "-c", config)
    assert (again.returncode, "nothing to delete" in again.stdout) == (0, True)


def test_archive_refuses_what_it_must(machine, store, config):
    nobody = machine.podwatch("runs", "archive", "nosuchrun", "--yes", "-c", config)
    assert (nobody.returncode, "no pointer" in nobody.stderr) == (69, True)
    strange = machine.podwatch("runs", "archive", "../x", "--yes", "-c", config)
    assert (strange.returncode, "not a valid run id" in strange.stderr) == (64, True)
    store.put(PAST.heartbeat, b"{}")
    alive = machine.podwatch("runs", "archive", "past", "--yes", "-c", config)
    assert (alive.returncode, "podwatch is active on run" in alive.stderr) == (75, True)


def test_a_run_as_a_record(machine, store, config):
    account = AccountTotals(1_795_132_800.0, 3600.0, money=MoneyDocument(so_far=8.5, currency="EUR"))
    put_beat(store, PAST, outcome="finished", step=20, account=account)
    shown = machine.podwatch("runs", "show", "past", "-c", config)
    assert shown.returncode == 0, shown.stderr
    assert "cost      8.50 EUR" in shown.stdout
    assert "newest: step 30; 3 steps" in shown.stdout
    document = json.loads(machine.podwatch("runs", "show", "past", "--json", "-c", config).stdout)
    assert (document["outcome"], document["step"], document["cost"]) == ("finished", 20, 8.5)
    assert document["command"] == ["python", "train.py"]
    nobody = machine.podwatch("runs", "show", "nosuchrun", "-c", config)
    assert (nobody.returncode, "holds nothing of run nosuchrun" in nobody.stderr) == (69, True)
    compared = machine.podwatch("runs", "diff", "past", "r", "-c", config)
    assert compared.returncode == 0, compared.stderr
    assert "past: no configuration is stored" in compared.stderr
