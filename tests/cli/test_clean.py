"""``podwatch clean``: a fresh start that destroys nothing; and ``--gpu``, which ends what was confirmed and no more."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.cli import stray_gpu_processes
from podwatch.journal import Journal
from podwatch.recovery import RunFile
from podwatch.system.own_directories import Workspace
from podwatch.system.procfs import identify
from tests.blackbox.conftest import make_rig, nvml_library, rig  # noqa: F401 - fixtures
from tests.recovery.conftest import quick_dir, world  # noqa: F401 - fixtures
from tests.support import warm
from tests.support.asking import running, status
from tests.support.recovery_world import Podwatch, Store, World, stored
from tests.support.rig import Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HERE = Path(__file__).parents[2]


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


# -- strays on the GPUs


HOLD = """
import os, signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = [open("/dev/nvidia-uvm"), open("/dev/nvidia6")]
print(os.getpid(), flush=True)
time.sleep(100)
"""


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[list[str]]:
    """A command prefix: a mount namespace of its own whose /dev has NVIDIA's files, as ordinary ones. A card
    that no other test guards: by their names, seen from outside, these processes would pass for its training."""
    dev = tmp_path / "dev"
    (dev / "shm").mkdir(parents=True)
    for name in ("null", "urandom", "zero", "nvidia-uvm", "nvidia6"):
        (dev / name).touch()
    bind = 'for n in null urandom zero; do mount --bind /dev/$n "$0/$n" || exit 99; done'
    script = f'{bind}; mount --bind "$0" /dev && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", script, str(dev)]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own (root)")
    return prefix


def in_the_pod(cards: list[str], tmp_path: Path, body: str) -> str:
    """Run Python in that namespace; it finds ``spawn(kind, **environment) -> pid`` and ``settings``."""
    program = f"""
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
from podwatch.cli import stray_gpu_processes as strays
from podwatch.config.settings import Settings
settings = Settings.model_validate({{"run_id": "r", "state_dir": Path({str(tmp_path)!r}) / "state",
                    "trainer": {{"output_dir": {str(tmp_path / "out")!r}}}, "gpu": {{"inference": [6]}}}})
HOLD, root = {HOLD!r}, Path({str(tmp_path)!r})
started = []
def spawn(kind="mild", **environment):
    p = subprocess.Popen([sys.executable, "-c", {HOLD!r}, kind, "--api-key", "supersecretvalue"],
                         stdout=subprocess.PIPE, text=True, env={{**os.environ, **environment}})
    started.append(p)
    return int(p.stdout.readline())
def living():
    return [p.pid for p in started if p.poll() is None]
try:
{chr(10).join("    " + line for line in body.splitlines())}
finally:
    for p in started:
        p.kill()
"""
    done = subprocess.run([*cards, sys.executable, "-c", program], capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_strays_are_told_apart_and_only_the_confirmed_end(cards: list[str], tmp_path: Path) -> None:
    out = in_the_pod(
        cards,
        tmp_path,
        """
foreign = spawn()
left = spawn("stubborn", PODWATCH_START_ID="s1", PODWATCH_RUN="r")
other = spawn(PODWATCH_START_ID="s2", PODWATCH_RUN="another")
found = strays.look(settings)
by_pid = {s.identity.pid: s for s in found.strays}
assert set(by_pid) == {foreign, left, other}, by_pid
assert not by_pid[foreign].leftover and by_pid[foreign].whose == "does not belong to this run"
assert by_pid[left].leftover
assert not by_pid[other].leftover and "another" in by_pid[other].whose
text = "\\n".join(strays.describe(found))
assert "supersecretvalue" not in text and "GPU 6" in text, text
ended = strays.end([by_pid[left]], term=0.3)
assert ended == {by_pid[left]: "killed"}, ended
started[1].wait()
assert sorted(living()) == sorted([foreign, other])
ended = strays.end([by_pid[foreign], by_pid[left]], term=5)
assert ended == {by_pid[foreign]: "ended", by_pid[left]: "had already ended"}, ended
print("well")
""",
    )
    assert out == "well\n"


def test_nothing_interactive_and_no_other_users_process_is_ended(cards: list[str], tmp_path: Path) -> None:
    """A notebook's kernel with the marker of an earlier start, and another user's process."""
    out = in_the_pod(
        cards,
        tmp_path,
        """
(root / "ipykernel_launcher.py").write_text(HOLD)
kernel = subprocess.Popen([sys.executable, "-m", "ipykernel_launcher", "mild"], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": str(root), "PODWATCH_START_ID": "s1", "PODWATCH_RUN": "r"})
started.append(kernel)
kernel.stdout.readline()
holds = "exec 8</dev/nvidia-uvm 9</dev/nvidia6; echo up; exec sleep 100"
other = subprocess.Popen(["/bin/sh", "-c", holds], user=47116, stdout=subprocess.PIPE, text=True, cwd="/",
                         env={"PATH": os.environ["PATH"], "PODWATCH_START_ID": "s1", "PODWATCH_RUN": "r"})
started.append(other)
other.stdout.readline()
found = {s.identity.pid: s for s in strays.look(settings).strays}
assert set(found) == {kernel.pid, other.pid}, found
assert found[kernel.pid].interactive and not found[kernel.pid].leftover
assert not found[other.pid].leftover and "but of another user" in found[other.pid].whose
assert strays.end([found[kernel.pid]], term=0.3) == {found[kernel.pid]: "not ended: it is interactive"}
assert kernel.poll() is None and other.poll() is None
print("well")
""",
    )
    assert out == "well\n"


def test_a_session_whose_number_is_another_processs_by_now_makes_no_leftover(cards: list[str], tmp_path: Path) -> None:
    """The last start's launcher is gone, and its pid leads a stranger's session."""
    out = in_the_pod(
        cards,
        tmp_path,
        """
from podwatch.system.procfs import identify
from podwatch.trainer.supervisor_files import SupervisorRecord
import podwatch.cli.stray_gpu_processes as module
stranger = subprocess.Popen([sys.executable, "-c", HOLD, "mild"], stdout=subprocess.PIPE, text=True,
                            start_new_session=True)
started.append(stranger)
stranger.stdout.readline()
mine = identify(stranger.pid)
older = type(mine)(mine.pid, mine.start_ticks - 5, mine.boot_id, mine.pid_namespace)
import inspect
fields = {name: "" for name in inspect.signature(SupervisorRecord).parameters}
fields.update(supervisor=older, launcher=older, directory=root, start_id="s1")
module.read_record = lambda _: SupervisorRecord(**fields)
(found,) = strays.look(settings).strays
assert found.identity == mine and not found.leftover, found
print("well")
""",
    )
    assert out == "well\n"


def test_the_command_ends_leftovers_and_asks_for_the_rest(cards: list[str], tmp_path: Path) -> None:
    config, _ = pod(tmp_path)
    out = in_the_pod(
        cards,
        tmp_path,
        f"""
foreign = spawn()
left = spawn(PODWATCH_START_ID="s1", PODWATCH_RUN="r")
def run(*arguments):
    return subprocess.run([sys.executable, "-m", "podwatch", "-c", {str(config)!r}, "clean", "--gpu", *arguments],
                          capture_output=True, text=True, stdin=subprocess.DEVNULL)
listed = run()
assert listed.returncode == 0, listed.stderr
assert f"pid {{foreign}}" in listed.stdout and f"pid {{left}}" in listed.stdout, listed.stdout
assert len(living()) == 2
done = run("--yes", "--json")
assert done.returncode == 0, done.stderr
import json
ended = {{p["pid"]: p["ended"] for p in json.loads(done.stdout)["processes"]}}
assert ended == {{foreign: None, left: "ended"}}, ended
started[1].wait()
assert living() == [foreign]
print("well")
""",
    )
    assert out == "well\n"


def test_a_successor_with_the_same_pid_is_never_ended() -> None:
    process = subprocess.Popen(["sleep", "50"])
    try:
        identity = identify(process.pid)
        assert identity is not None
        older = type(identity)(identity.pid, identity.start_ticks - 1, identity.boot_id, identity.pid_namespace)
        stray = stray_gpu_processes.Stray(
            older, "root", time.time(), "sleep", (0,), True, "does not belong to this run", False
        )
        assert stray_gpu_processes.end([stray], term=0.1) == {stray: "had already ended"}
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
