"""``podwatch runs`` as real processes on a real local store."""

import json
import time

import pytest

from podwatch.domain.account_document import AccountTotals, MoneyDocument
from podwatch.domain.lease import Heartbeat
from podwatch.domain.manifest import Keys
from podwatch.journal.journal import Journal
from podwatch.stores.local import LocalStore
from podwatch.system.files import FileLock
from tests.cli.old_store import stored
from tests.support.past_runs import past_run, tree

pytestmark = pytest.mark.slow

__all__ = ["stored"]

DAY = 86400.0


def days_ago(machine, days: float) -> LocalStore:
    return LocalStore(machine.directory / "store", writer_id="w", wall=lambda: time.time() - days * DAY)


def test_list(stored):
    machine, _, config, body = stored
    past_run(days_ago(machine, 3), Keys("past"), 10, 20)
    shown = machine.podwatch("runs", "list", "-c", config)
    assert shown.returncode == 0, shown.stderr
    assert max(len(line) for line in shown.stdout.splitlines()) <= 80
    past, mine = (next(x for x in shown.stdout.splitlines() if x.startswith(n)) for n in ("past", "r "))
    assert past.split()[:3] == ["past", "20", "2"]
    assert mine.split()[:3] == ["r", "40", "1"]
    document = json.loads(machine.podwatch("runs", "list", "-c", config, "--json").stdout)
    runs = {r["run_id"]: r for r in document["runs"]}
    assert (runs["r"]["newest_step"], runs["r"]["saves"], runs["r"]["ours"]) == (40, 1, True)
    assert runs["r"]["size_bytes"] > len(body)


def test_list_and_restore_from_anywhere(stored):
    machine, _, _, body = stored
    url, there = f"file://{machine.directory}/store", machine.directory / "there"
    listed = json.loads(machine.podwatch("runs", "list", "--store", url, "--json").stdout)
    assert [(r["run_id"], r["newest_step"]) for r in listed["runs"]] == [("r", 40)]
    before = set(tree(machine.directory))
    result = machine.podwatch("runs", "restore", "r", "--store", url, "--to", str(there))
    assert result.returncode == 0, result.stderr
    assert "restored step 40 of r" in result.stdout
    assert body in [path.read_bytes() for path in tree(there).values()]
    made = set(tree(machine.directory)) - before
    assert all(name.startswith("there/") for name in made), made
    none = machine.podwatch("runs", "restore", "nothing", "--store", url, "--to", str(there))
    assert none.returncode == 69
    named = machine.podwatch("runs", "show", "nothing", "--store", url)
    assert f"`podwatch runs show nothing --store {url}`" in none.stderr
    assert f"`podwatch runs list --store {url}`" in named.stderr, "what works without a configuration"


def test_archive(stored):
    machine, output, config, _ = stored
    keys, store = Keys("past"), days_ago(machine, 3)
    past_run(store, keys, 10, 20, 30)
    state = output.parent / "state" / "past"
    state.mkdir(parents=True)
    Journal.open(state / "journal.sqlite").close()
    dry = machine.podwatch("runs", "archive", "past", "--dry-run", "-c", config)
    assert (dry.returncode, dry.stdout.count("would delete")) == (0, 2), dry.stderr
    asked = machine.podwatch("runs", "archive", "past", "-c", config)
    assert (asked.returncode, "--yes" in asked.stderr) == (64, True)
    with FileLock(state / "guard.lock"):
        guarded = machine.podwatch("runs", "archive", "past", "--yes", "-c", config)
    assert (guarded.returncode, "already held by" in guarded.stderr) == (75, True)
    assert len(list(store.list(keys.step(10)))) == 3
    done = json.loads(machine.podwatch("runs", "archive", "past", "--yes", "--json", "-c", config).stdout)
    assert [(s["step"], s["stays"]) for s in done["saves"]] == [(10, False), (20, False), (30, True)]
    assert not list(store.list(keys.step(10)))
    assert "archived" in machine.podwatch("runs", "list", "-c", config).stdout
    again = machine.podwatch("runs", "archive", "past", "-c", config)
    assert (again.returncode, "nothing to delete" in again.stdout) == (0, True)


def test_archive_refuses_what_it_must(stored):
    machine, _, config, _ = stored
    nobody = machine.podwatch("runs", "archive", "nosuchrun", "--yes", "-c", config)
    assert (nobody.returncode, "no latest.json" in nobody.stderr) == (69, True)
    strange = machine.podwatch("runs", "archive", "../x", "--yes", "-c", config)
    assert (strange.returncode, "not a valid run id" in strange.stderr) == (64, True)
    past_run(days_ago(machine, 3), Keys("past"), 10, 20)
    LocalStore(machine.directory / "store", writer_id="w").put_bytes(Keys("past").heartbeat, b"{}")
    alive = machine.podwatch("runs", "archive", "past", "--yes", "-c", config)
    assert (alive.returncode, "podwatch is active on run" in alive.stderr) == (75, True)


def test_a_run_as_a_record(stored):
    machine, _, config, _ = stored
    past_run(days_ago(machine, 3), Keys("past"), 10, 20)
    account = AccountTotals(1_795_132_800.0, 3600.0, money=MoneyDocument(so_far=8.5, currency="EUR"))
    beat = Heartbeat(outcome="finished", step=20, account=account).to_bytes()
    LocalStore(machine.directory / "store", writer_id="w").put_bytes(Keys("past").heartbeat, beat)
    shown = machine.podwatch("runs", "show", "past", "-c", config)
    assert shown.returncode == 0, shown.stderr
    assert "cost      8.50 EUR" in shown.stdout
    assert "newest: step 20; 2 steps" in shown.stdout
    document = json.loads(machine.podwatch("runs", "show", "past", "--json", "-c", config).stdout)
    assert (document["outcome"], document["step"], document["cost"]) == ("finished", 20, 8.5)
    nobody = machine.podwatch("runs", "show", "nosuchrun", "-c", config)
    assert (nobody.returncode, "holds nothing of run nosuchrun" in nobody.stderr) == (69, True)
    compared = machine.podwatch("runs", "diff", "past", "r", "-c", config)
    assert compared.returncode == 0, compared.stderr
    assert "past: no configuration is stored" in compared.stderr
    table = machine.podwatch("runs", "list", "--completed", "-c", config).stdout.splitlines()
    assert [line.split()[0] for line in table] == ["RUN", "past"]
    assert table[1].split()[-4:] == ["8.50", "EUR", "20", "finished"]
