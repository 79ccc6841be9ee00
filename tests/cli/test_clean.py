"""``podwatch clean``: a fresh start that destroys nothing."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.journal import Journal
from podwatch.recovery import RunFile
from podwatch.system.own_directories import Workspace
from tests.blackbox.conftest import make_rig, nvml_library, rig  # noqa: F401 - fixtures
from tests.recovery.conftest import quick_dir, world  # noqa: F401 - fixtures
from tests.support import warm
from tests.support.asking import running, status
from tests.support.recovery_world import Podwatch, Store, World, stored
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# -- set aside


def pod(tmp_path: Path) -> tuple[Path, Path]:
    output = tmp_path / "outputs"
    for step in (5, 10):
        directory = output / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        (directory / "model.safetensors").write_bytes(b"weights")
    config = tmp_path / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\nstate_dir = "{tmp_path}/state"\n[trainer]\nlayout = "hf"\noutput_dir = "{output}"\n'
        f'command = ["{sys.executable}", "train.py"]\n'
    )
    config.chmod(0o600)
    return config, output


def podwatch(config: Path, *arguments: str, answer: str | None = None) -> subprocess.CompletedProcess[str]:
    """``answer``: typed on a terminal."""
    command = ("-c", str(config), *arguments)
    environ = {**os.environ, "PODWATCH_RUNTIME_DIR": str(config.parent / "run")}
    if answer is None:
        return warm.podwatch(*command, env=environ)
    master, slave = pty.openpty()
    os.write(master, f"{answer}\n".encode())
    try:
        return warm.podwatch(*command, env=environ, stdin=slave)
    finally:
        os.close(master)
        os.close(slave)


def test_without_a_daemon_everything_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    config, output = pod(tmp_path)
    before = {p.relative_to(output): p.read_bytes() for p in output.rglob("*") if p.is_file()}
    assert podwatch(config, "clean", "--dry-run").stdout.startswith("to quarantine: 2 entries")
    unasked = podwatch(config, "clean")
    assert (unasked.returncode, "--yes" in unasked.stderr) == (64, True)
    refused = podwatch(config, "clean", answer="n")
    assert refused.returncode == 1
    assert before == {p.relative_to(output): p.read_bytes() for p in output.rglob("*") if p.is_file()}

    done = podwatch(config, "clean", answer="y")
    assert done.returncode == 0, done.stderr
    assert "2 entries moved to quarantine 1 (`podwatch quarantine return 1`" in done.stdout
    assert not list(output.iterdir())
    record = json.loads((tmp_path / "state/r/run.json").read_text())
    assert [start["by"] for start in record["starts"]] == ["guard", "clean"]
    assert record["starts"][-1]["branch"] != record["starts"][0]["branch"]
    assert record["starts"][-1]["from_step"] is None
    journal = Journal.open(tmp_path / "state/r/journal.sqlite", read_only=True)
    assert [e.name for e in journal.events()] == ["quarantined"]
    journal.close()
    again = podwatch(config, "clean", "--yes")
    assert "no files of an old run found" in again.stdout

    assert podwatch(config, "quarantine", "return", "1").returncode == 0
    assert before == {p.relative_to(output): p.read_bytes() for p in output.rglob("*") if p.is_file()}


async def test_what_the_store_holds_of_the_old_line_is_not_fetched_again(world: World) -> None:  # noqa: F811
    """Also where nothing was ever started here: sets from before podwatch, and a store that knows the run."""
    from podwatch.recovery import Phase
    from podwatch.recovery.clean import clean_alone

    world.save(15, wall=1.0)
    world.clock.advance(100)
    first = Podwatch(world)
    cleaned = await clean_alone(first.recovery)
    await first.leave()
    assert cleaned.number == 1
    assert cleaned.starts
    heir = Podwatch(world, restore=Store(world, stored(12, "s", "old-line", 3)))
    await heir.recovery.begin()
    await heir.until(Phase.CONFIRMING)
    assert world.plans[-1].step is None
    await heir.leave()


async def test_the_record_of_another_run_is_replaced(world: World) -> None:  # noqa: F811
    from podwatch.recovery.clean import clean_alone

    other = RunFile(world.root / "other", Workspace(world.output), "other", world.clock)
    other.edit_now(lambda run: run)
    other.close()
    world.clock.advance(100)
    first = Podwatch(world)
    cleaned = await clean_alone(first.recovery)
    recorded = first.recorded()
    assert (cleaned.number, recorded.run_id, recorded.adopted) == (None, "r1", "")
    assert recorded.guarded_since == world.clock.wall(), "what is older is not this run's"
    assert recorded.lineage.id
    await first.leave()
    heir = Podwatch(world)
    assert heir.file.other_run == ""
    await heir.leave()


async def test_a_step_refused_in_the_old_line_is_not_refused_in_the_new_one(world: World) -> None:  # noqa: F811
    from podwatch.recovery import Phase

    world.settings_extra = {"recovery": {"retry_after_give_up": 0}}
    first = Podwatch(world)
    world.start_error = "no"
    await first.recovery.begin()
    await first.until(Phase.GAVE_UP)
    first.recovery.context.note(refused={15: "resumed wrong from step 15"})
    world.save(15)
    world.start_error = ""
    await first.recovery.requests.clean()
    await first.until(Phase.CONFIRMING)
    assert world.plans[-1].step is None
    assert not (world.output / "checkpoints/step_15").exists()
    assert first.recovery.context.run.refused == {}
    await first.leave()


async def test_a_fresh_start_forgets_what_was_refused_in_the_line_it_leaves(world: World) -> None:  # noqa: F811
    from podwatch.recovery import Phase

    world.settings_extra = {"recovery": {"retry_after_give_up": 0}}
    first = Podwatch(world)
    world.start_error = "no"
    await first.recovery.begin()
    await first.until(Phase.GAVE_UP)
    first.recovery.context.note(refused={15: "resumed wrong from step 15"})
    world.start_error = ""
    await first.recovery.requests.start(fresh=True)
    await first.until(Phase.CONFIRMING)
    assert first.recovery.context.run.refused == {}
    await first.leave()


def test_through_the_daemon_only_while_nothing_trains(rig: Rig) -> None:  # noqa: F811
    daemon = rig.daemon().start()
    running(daemon, rig, step=5)
    busy = daemon.command("clean", "--yes")
    assert busy.returncode == 75, busy.stdout
    assert "training is running" in busy.stderr
    assert "stop-training" in busy.stderr
    assert rig.saved
    assert daemon.command("clean", "--dry-run").returncode == 75
    daemon.command("stop-training")
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 20, "stopped")
    kept = rig.saved

    def whole() -> list[int]:
        sets = status(daemon)["checkpoints"]["sets"]
        return sorted(s["step"] for s in sets if s["completeness"] == "complete")

    daemon.wait_for(lambda: whole() == kept, 20, "what was saved last is known to be whole")
    done = daemon.command("clean", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["quarantine"] == 1
    assert rig.saved == []
    assert not rig.trainer_pid, "a stop stays a stop"
    daemon.command("start")
    daemon.wait_for(lambda: len(rig.starts) == 2, 20, "a fresh start")
    assert rig.starts[1]["step"] in (None, 0)
    daemon.command("stop-training")
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 20, "stopped")
    listed = json.loads(daemon.command("quarantine", "list", "--json").stdout)["quarantines"]
    # The stop may have cut a save off: that step is set aside too, as what it is.
    assert sorted(int(n) for n, kind in listed[0]["steps"].items() if kind == "complete") == kept
