"""``podwatch checkpoints`` against a running daemon, whose trainer goes on saving meanwhile."""

import json
from typing import Any

from tests.support.asking import running, status
from tests.support.daemon import DaemonProcess
from tests.support.rig import Rig


def listed(daemon: DaemonProcess) -> dict[str, Any]:
    answer = daemon.command("checkpoints", "--json")
    assert answer.returncode == 0, answer.stderr
    return dict(json.loads(answer.stdout))


def test_what_the_daemon_says_of_its_checkpoints(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)

    # -- the list, with what holds each set and what this filesystem can show
    found = listed(daemon)
    sets = {s["step"]: s for s in found["sets"]}
    assert sets[5]["completeness"] == "complete"
    newest = max(step for step, s in sets.items() if s["completeness"] == "complete")
    assert "newest complete" in sets[newest]["held_by"]
    assert (found["remote"], found["store_url"]) == ([], "")
    assert set(found["capabilities"]) == {"filesystem", "slow", "inotify"}
    assert found["capabilities"]["slow"] is False
    told = status(daemon)["daemon"]
    assert told["capabilities"] == found["capabilities"]
    assert (told["layout"], told["layout_because"]) == ("prime-rl", ""), "named by the configuration"

    # -- pin and unpin: durable, and told wherever sets are shown
    pinned = daemon.command("checkpoints", "pin", "5", "--reason", "figure 2")
    assert (pinned.returncode, pinned.stderr) == (0, "")
    assert "step 5 is pinned" in pinned.stdout
    shown = next(s for s in listed(daemon)["sets"] if s["step"] == 5)
    assert shown["pinned"] == "figure 2"
    assert "pinned: figure 2" in shown["held_by"]
    assert next(s for s in status(daemon)["checkpoints"]["sets"] if s["step"] == 5)["pinned"] == "figure 2"

    # -- verify: one step, all of them, one that is not there
    sound = daemon.command("checkpoints", "verify", "--step", "5")
    assert (sound.returncode, "step 5: sound" in sound.stdout) == (0, True), sound.stdout + sound.stderr
    begun = rig.output / "checkpoints" / "step_100000" / "trainer"
    begun.mkdir(parents=True)
    (begun / "__0_0.distcp").write_bytes(b"half")
    daemon.wait_for(lambda: any(s["step"] == 100000 for s in listed(daemon)["sets"]), 20, "the set being written")
    every = json.loads(daemon.command("checkpoints", "verify", "--json").stdout)["steps"]
    assert 5 in [r["step"] for r in every if r["sound"] and r["files_checked"]]
    assert 100000 not in [r["step"] for r in every], "a set that is being written is not broken"
    for arguments in (("verify", "--step", "999"), ("unpin", "999")):
        refused = daemon.command("checkpoints", *arguments)
        assert refused.returncode == 64
        assert "999" in refused.stderr
        assert "podwatch checkpoints" in refused.stderr, "it says what to do"

    shard = next((rig.output / "checkpoints" / "step_5").rglob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    broken = daemon.command("checkpoints", "verify", "--step", "5", "--json")
    (answer,) = json.loads(broken.stdout)["steps"]
    assert (broken.returncode, answer["sound"]) == (1, False)
    assert shard.name in answer["reasons"][0]

    unpinned = daemon.command("checkpoints", "unpin", "5")
    assert (unpinned.returncode, unpinned.stdout.strip()) == (0, "step 5 is no longer pinned")
    assert all(not s["pinned"] for s in listed(daemon)["sets"])
    assert daemon.command("checkpoints", "unpin", "5").returncode == 64, "it is not pinned"
