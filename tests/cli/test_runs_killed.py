"""``podwatch runs archive`` as a process that is killed at any moment: nothing is half-named; the next try finishes."""

import random
import signal
import subprocess
import sys
import time

import pytest

from podwatch.store.inventory import take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Access, B2Objects
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.stored_runs import past_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
"""Seconds: each kill is a process of its own, and the gate runs others beside it."""


@pytest.fixture
def bucket(tmp_path):
    with B2Server(tmp_path / "b2") as server:
        yield server


def config(tmp_path):
    path = tmp_path / "podwatch.toml"
    path.write_text(
        f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[trainer]\nlayout = "custom"\noutput_dir = "{tmp_path}/out"\n'
        f'[checkpoints.custom]\nparts = "s{{step}}"\nrequire = ["model.bin"]\n[sync]\nstore = "b2://{BUCKET}"\n'
    )
    path.chmod(0o600)
    return str(path)


def command(server, tmp_path, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "podwatch", "runs", *arguments, "-c", config(tmp_path)],
        env=server.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip


def killed_at_random(server, tmp_path, check, *arguments, kills):
    """Killed ``kills`` times, each later in its calls, then left to finish."""
    server.pace(latency=0.03)
    dice = random.Random(7)
    before = sum(server.calls().values())
    for kill in range(kills):
        process = command(server, tmp_path, *arguments)
        wanted = sum(server.calls().values()) + 4 + kill * 8 + dice.randrange(6)
        while sum(server.calls().values()) < wanted and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        _quiet(server)
        check()
    server.pace()
    process = command(server, tmp_path, *arguments)
    said, _ = process.communicate(timeout=150)
    assert process.returncode == 0, said
    assert sum(server.calls().values()) > before
    check()


def _quiet(server):
    """Until the server has done what it was asked last."""
    seen = -1
    while seen != (seen := server.admin("count")["events"]):
        time.sleep(0.2)


def store_of(server):
    return B2Objects(BUCKET, B2Access(KEY_ID, KEY, server.url))


def whole(server, keys):
    """Every save with a manifest has each of its objects, with size and hash, and the newest pointer names one."""
    store = store_of(server)
    found = take_inventory(store, keys)
    store.close()
    assert [save.problem for save in found.saves if save.problem] == []
    assert found.newest is not None
    assert found.pointers[0].pointer.save == found.newest.key
    return sorted(save.step for save in found.saves)


def newest_stays(server, keys):
    assert whole(server, keys)[-1] == 40


def test_archive_killed_at_any_moment(bucket, tmp_path):
    keys = RunKeys("past")
    store = store_of(bucket)
    past_run(store, keys, 10, 20, 30, 40)
    bucket.admin("clock", ahead=2 * 86400.0)  # the run ended two days ago, by the store's clock
    killed_at_random(bucket, tmp_path, lambda: newest_stays(bucket, keys), "archive", "past", "--yes", kills=3)
    assert whole(bucket, keys) == [40]
    bucket.admin("clock", ahead=4 * 86400.0)  # what a kill left of a checkpoint goes a day later
    process = command(bucket, tmp_path, "archive", "past", "--yes")
    assert (process.communicate(timeout=150), process.returncode)[1] == 0
    left = {o.key.removeprefix(keys.root).partition("/")[0] for o in store.list(keys.root)}
    assert left == {"latest.json", "config", "pointers", "step_40"}
    store.close()
