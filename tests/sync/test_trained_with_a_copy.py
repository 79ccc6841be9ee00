"""A trainer whose store is a copy that another tool made: podwatch continues, and deletes none of its files."""

import shutil
from pathlib import Path

from podwatch.config.settings import SyncSettings
from podwatch.sync.publish_and_pointer import read_pointer
from podwatch.sync.store_removal import RemoteRetention
from tests.sync.conftest import Run, Shifted, World
from tests.sync.test_optional_parts import Confirmed
from tests.sync.test_restore import publish


async def test_training_continues_and_old_checkpoints_stay(local: World, run: Run, tmp_path: Path) -> None:
    await publish(local, run, 1, 2, size=1000)
    copy = tmp_path / "copied"
    shutil.copytree(local.store_url.removeprefix("file://"), copy, copy_function=shutil.copyfile)
    pod = World(tmp_path / "pod3", f"file://{copy}", writer_id="writer-3")
    assert pod.restorer().fetch().step == 2
    pod.scan()
    syncer = await run(pod)
    for step in (3, 4, 5):
        pod.write_set(step, size=1000)
        pod.scan()
        await syncer.sync_now()
        assert pod.violations() == []
    await syncer.stop()
    store = pod.store()
    pointer = read_pointer(store, pod.keys)
    assert pointer is not None
    assert pointer.step == 5
    policy = SyncSettings(keep_last=1, keep_every=0)
    retention = RemoteRetention(store, pod.keys, pod.journal, policy, Shifted(1e6), pod.identity(), Confirmed(), {})
    pruned = retention.carry_out()
    assert [step for step, _, _ in pruned.removed] == [3, 4], "its own, although the older one stays"
    assert "podwatch's mark" in pruned.warning
    assert "step 2" in pruned.warning
    assert list(copy.glob("run/podwatch/step_2/*/manifest.json"))
    store.close()
    assert pod.violations() == []
