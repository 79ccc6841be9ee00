"""Which checkpoint a restart resumes from, and where the others go: after failed loads, faults, a person's word."""

import hashlib
from pathlib import Path

import pytest

from tests.support.asking import confirmed, looks, running, wait_reason
from tests.support.resuming import quarantine_of, quarantines, stands, steps_of
from tests.support.rig import Rig

pytestmark = pytest.mark.slow

LOAD_ERRORS = {
    "torch": ["RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory"],
    "safetensors": ["safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge"],
    "named": ["ValueError: cannot read the optimizer of checkpoints/step_{step}"],
}
NO_FAULT_OF_THE_CHECKPOINT = {
    "illegal access": ["RuntimeError: CUDA error: an illegal memory access was encountered"],
    "no memory": ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"],
    "nccl": ["torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error"],
}


def content(directory: Path) -> dict[str, str]:
    """Each file below it with its hash."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def part(rig: Rig, step: int) -> Path:
    return rig.output / "checkpoints" / f"step_{step}"


@pytest.mark.parametrize("error", LOAD_ERRORS)
def test_two_failed_loads_step_back_and_keep_what_failed(rig: Rig, error: str) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=15)
    newest = stands(rig, daemon)
    before, kept = rig.saved[-2], content(part(rig, newest))
    rig.order(wait=True, fail_load=[newest], say=[line.format(step=newest) for line in LOAD_ERRORS[error]])
    rig.kill("trainer")
    assert daemon.wait_event("stepped-back", 60)["step"] == newest
    daemon.wait_for(lambda: len(rig.starts) >= 4 and rig.trainer_pid, 60, "it starts from the one before")
    assert steps_of(rig) == [None, newest, newest, before]
    assert rig.saved[-1] == before
    number = quarantine_of(daemon, newest)
    rig.obey()
    daemon.wait_for(lambda: rig.saved[-1] >= newest, 60, "it saves this step again")
    refused = daemon.command("quarantine", "return", str(number))
    assert refused.returncode == 75, (refused.returncode, refused.stdout + refused.stderr)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60)
    occupied = daemon.command("quarantine", "return", str(number))
    assert occupied.returncode not in (0, 1), "what was saved since would be overwritten"
    places = list((rig.root / "work").rglob(f"quarantine/{number}/*-step_{newest}"))
    assert kept in [content(place) for place in places], places
    assert len(steps_of(rig)) == 4


@pytest.mark.parametrize("fault", NO_FAULT_OF_THE_CHECKPOINT)
def test_a_fault_of_the_machine_never_steps_back(rig: Rig, fault: str) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=10)
    newest = stands(rig, daemon)
    rig.order(fail_load=[newest], say=NO_FAULT_OF_THE_CHECKPOINT[fault])
    rig.kill("trainer")
    daemon.wait_for(lambda: len(rig.starts) >= 5, 60, "four more starts")
    seen = len(daemon.events())
    rig.obey()
    confirmed(daemon, after=seen)
    assert set(steps_of(rig)) == {None, newest}
    assert [e for e in daemon.events() if e["podwatch_event"] == "stepped-back"] == []
    assert part(rig, newest).exists()


def test_a_start_that_ends_before_it_loads_never_steps_back(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=10)
    newest = stands(rig, daemon)
    rig.order(early=["OSError: [Errno 98] error while attempting to bind on address: address already in use"])
    rig.kill("trainer")
    daemon.wait_for(lambda: len(rig.starts) >= 5, 60, "four more starts")
    seen = len(daemon.events())
    rig.obey()
    confirmed(daemon, after=seen)
    assert set(steps_of(rig)) == {None, newest}
    assert part(rig, newest).exists()


def test_a_start_from_a_step_below_sets_aside_what_is_above_and_return_undoes_it(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=20)
    newest = stands(rig, daemon)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60)
    chosen, above = rig.saved[1], rig.saved[2:]
    kept = {step: content(part(rig, step)) for step in above}
    rig.order(wait=True)  # it saves nothing before we have looked
    started = daemon.command("start", "--step", str(chosen))
    assert started.returncode == 0, started.stderr
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "it starts")
    assert steps_of(rig) == [None, chosen]
    assert rig.saved[-1] == chosen
    number = quarantine_of(daemon, newest)
    assert quarantines(daemon)[number] == above
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_for(lambda: not rig.trainer_pid, 60, "it is stopped")
    daemon.wait_for(lambda: daemon.command("quarantine", "return", str(number)).returncode == 0, 30, "it is returned")
    assert {step: content(part(rig, step)) for step in above} == kept
    assert quarantines(daemon) == {}
    assert daemon.command("quarantine", "return", str(number)).returncode == 69


def test_a_step_that_does_not_exist_is_refused_and_nothing_moves(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=10)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60)
    saved = rig.saved
    refused = daemon.command("start", "--step", "7")
    assert refused.returncode not in (0, 1), refused.stdout + refused.stderr
    assert (rig.saved, quarantines(daemon), len(rig.starts)) == (saved, {}, 1)


def test_a_fresh_start_sets_aside_every_checkpoint_and_destroys_none(rig: Rig) -> None:
    daemon = rig.daemon().start()
    running(daemon, rig, step=15)
    stands(rig, daemon)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_event("trainer-stopped", 60)
    saved = rig.saved
    kept = {step: content(part(rig, step)) for step in saved}
    rig.order(wait=True)
    started = daemon.command("start", "--fresh")
    assert started.returncode == 0, started.stderr
    daemon.wait_for(lambda: len(rig.starts) == 2 and rig.trainer_pid, 60, "it starts")
    assert steps_of(rig) == [None, None]
    assert rig.saved == []
    number = quarantine_of(daemon, saved[-1])
    assert quarantines(daemon)[number] == saved
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_for(lambda: not rig.trainer_pid, 60, "it is stopped")
    daemon.wait_for(lambda: daemon.command("quarantine", "return", str(number)).returncode == 0, 30, "it is returned")
    assert {step: content(part(rig, step)) for step in saved} == kept


def test_the_newest_save_that_no_inspection_can_judge_is_asked_about(rig: Rig) -> None:
    """Its index does not fit into the memory of an inspection: whether it is whole is not known."""
    daemon = rig.daemon().start()
    running(daemon, rig, step=10)
    newest = stands(rig, daemon)
    index = rig.output / "checkpoints" / f"step_{newest}" / "trainer" / ".metadata"
    index.write_bytes(b"\x80\x02(" + b"]" * 25_000_000 + b"t.")
    rig.kill("trainer")
    told = wait_reason(daemon, "blocked", 40)
    assert f"step {newest}" in told["summary"]
    looks(daemon, 3)
    assert steps_of(rig) == [None]
    assert quarantines(daemon) == {}
    rig.obey()
    assert daemon.command("start", "--step", str(newest - 5)).returncode == 0
    daemon.wait_for(lambda: steps_of(rig) == [None, newest - 5], 60, "it starts from the step that the operator named")
