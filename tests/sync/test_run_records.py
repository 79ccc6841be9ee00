"""A run read back from each kind of store: B2, S3 and a directory."""

import time
from dataclasses import replace

import pytest

from podwatch.cli.runs_show_and_diff import _spent, completed_table, run_document
from podwatch.domain.account_document import AccountTotals
from podwatch.domain.errors import HostError
from podwatch.domain.manifest import Keys
from podwatch.policy.run_summary import difference
from podwatch.stores.base import ObjectStore
from podwatch.sync.runs.bootstrap import Start, start_artefacts
from podwatch.sync.runs.read_runs import list_runs, read_run
from tests.policy.test_run_summary import BEAT
from tests.stores.conftest import *  # noqa: F403 - the fixtures of every store
from tests.support.past_runs import past_run

pytestmark = pytest.mark.parametrize("kind", ["file", "b2", "s3"])


@pytest.fixture
def store(kind, tmp_path, request) -> ObjectStore:
    if kind == "file":
        from podwatch.stores.local import LocalStore

        return LocalStore(tmp_path / "store", writer_id="w1")
    return request.getfixturevalue(kind)()


def stored(store: ObjectStore, name: str, tmp_path, *, lr: str) -> Keys:
    keys = Keys(name, "team")
    past_run(store, keys, 10, 20)
    config = tmp_path / f"{name}.d" / "train.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"lr = {lr}\n")
    config.chmod(0o644)
    text = f'run_id = "{name}"\n[trainer]\ncommand = ["rl", "@", "{config}"]\n'
    start = Start(name, text, str(tmp_path / "podwatch.toml"), str(tmp_path), (str(config),))
    for artefact in start_artefacts(start):
        store.put_bytes(f"{keys.artefacts('config')}{artefact.name}", artefact.data)
    beat = replace(BEAT, account=replace(BEAT.account or AccountTotals(), since=time.time()))
    store.put_bytes(keys.heartbeat, beat.to_bytes())
    return keys


def test_show_diff_and_the_table(store, tmp_path, kind):
    a, b = stored(store, "one", tmp_path, lr="1e-5"), stored(store, "two", tmp_path, lr="3e-5")
    found = read_run(store, a)
    assert (found.newest_step, found.steps, found.summary.outcome, found.summary.cost) == (
        20,
        (10, 20),
        "finished",
        8.47,
    )
    assert found.summary.started_wall is not None
    assert abs(found.summary.started_wall - time.time()) < 3600
    assert ("goodput", "98 %, 1 failure cost 60 s") in list(_spent(found.summary))
    document = run_document(found, texts=True)
    assert any(one["text"] == "lr = 1e-5\n" for one in document["files"])
    lines = difference("one", found.texts, "two", read_run(store, b).texts)
    assert "-lr = 1e-5" in lines
    assert "+lr = 3e-5" in lines
    runs, _ = list_runs(store, "team", "one", time.time())
    table = completed_table(run.summary for run in runs if run.summary is not None)
    assert len(table) == 3
    assert "8.47 EUR" in table[1]
    assert "finished" in table[1]


def test_a_run_that_is_not_there_and_one_without_a_configuration(store, tmp_path, kind):
    with pytest.raises(HostError, match="holds nothing of run"):
        read_run(store, Keys("none", "team"))
    past_run(store, Keys("bare", "team"), 10)
    found = read_run(store, Keys("bare", "team"))
    assert "no configuration is stored" in found.texts.problems[0]
    assert found.summary.outcome == ""


def test_what_podwatch_did_not_write_is_named_not_shown(store, tmp_path, kind):
    keys = stored(store, "one", tmp_path, lr="1")
    store.put_bytes(keys.heartbeat, b"[1, 2")
    store.put_bytes(f"{keys.artefacts('config')}bootstrap.json", b'{"kind": "evil"}')
    found = read_run(store, keys)
    assert found.summary.outcome == ""
    assert "not usable" in found.texts.problems[0]
