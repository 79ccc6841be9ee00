"""Stale files of a killed start go, and nothing else does; what cannot be ended is named."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from podwatch.domain.event import EventName
from podwatch.domain.finding import FindingKind
from podwatch.recovery import Phase, stale_files
from podwatch.trainer.trainer_handle import StopReport
from tests.recovery.test_restart import running
from tests.support.other_users import T, enterable, own
from tests.support.recovery_world import Handle, World, death

HOLDER = """
import ctypes, socket, sys
opened, mapped, bound, inside = sys.argv[1:]
a = open(opened)
call = ctypes.CDLL(None).mmap  # not the mmap module: that keeps a descriptor open
call.restype, call.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
with open(mapped, "r+b") as f:
    call(None, 4096, 1, 1, f.fileno(), 0)
s = socket.socket(socket.AF_UNIX); s.bind(bound)
c = open(inside)
print("held", flush=True)
sys.stdin.read()
"""


def places(root: Path) -> list[tuple[Path, str]]:
    return [(root, "vllm-*"), (root, "torchelastic_*")]


def clear_stale(uid: int, since: float, where: list[tuple[Path, str]]) -> tuple[Path, ...]:
    """As a start does it."""
    return stale_files.remove_stale(stale_files.find_stale(uid, since, where).stale, uid)


def test_only_what_is_ours_young_and_unused_goes(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("t")  # short: a socket's path holds 108 bytes
    me, start = os.geteuid(), time.time() - 50
    for name in ("vllm-open", "vllm-mapped", "vllm-stale", "vllm-old", "vllm-other", "keep-me"):
        (root / name).write_bytes(b"\0" * 4096)
    os.utime(root / "vllm-old", (start - 100, start - 100))
    for name in ("torchelastic_used", "torchelastic_stale"):
        (root / name / "deep").mkdir(parents=True)
        (root / name / "deep" / "log").write_text("x")
    (root / "torchelastic_stale" / "link").symlink_to(root / "keep-me")
    (root / "vllm-link").symlink_to(root / "keep-me")
    if me == 0:
        os.chown(root / "vllm-other", 12345, -1)
    else:
        (root / "vllm-other").unlink()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, root / "vllm-open", root / "vllm-mapped", root / "vllm-sock",
         root / "torchelastic_used/deep/log"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        found = stale_files.find_stale(me, start, places(root))
        if found.unseen:
            pytest.skip("processes here may not be looked into")
        assert {p.name for p in found.held} == {"vllm-open", "vllm-mapped", "vllm-sock", "torchelastic_used"}
        gone = clear_stale(me, start, places(root))
        assert {p.name for p in gone} == {"vllm-stale", "torchelastic_stale"}
        assert (root / "keep-me").exists()
        assert (root / "vllm-link").is_symlink()
        assert (root / "vllm-old").exists()
    finally:
        holder.communicate("")
    assert {p.name for p in clear_stale(me, start, places(root))} == {
        "vllm-open", "vllm-mapped", "vllm-sock", "torchelastic_used"
    }  # fmt: skip
    assert clear_stale(me, time.time() + 60, places(root)) == ()


def test_where_one_process_cannot_be_looked_into_nothing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm-x").write_text("")
    monkeypatch.setattr(stale_files.procfs, "open_files", lambda pid: None if pid == os.getpid() else {})
    found = stale_files.find_stale(os.geteuid(), 0.0, places(tmp_path))
    assert found.unseen
    assert clear_stale(os.geteuid(), 0.0, places(tmp_path)) == ()
    assert (tmp_path / "vllm-x").exists()


async def test_a_restart_clears_them_and_says_so(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    podwatch = await running(world)
    monkeypatch.setattr(stale_files, "PLACES", places(tmp_path))
    (tmp_path / "vllm-1").write_text("")
    if stale_files.find_stale(os.geteuid(), 0.0).unseen:
        pytest.skip("processes here may not be looked into")
    podwatch.see(18, finding=death())
    await podwatch.until(Phase.CONFIRMING)
    assert not (tmp_path / "vllm-1").exists()
    (said,) = [e.message for e in world.events if e.name is EventName.TRAINER_STARTING and "stale" in e.message]
    assert "vllm-1" in said
    await podwatch.leave()


async def test_what_is_stuck_in_the_kernel_is_named_and_nothing_starts_beside_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    podwatch = await running(world)
    stop, stuck = Handle.stop, [True]

    async def stubborn(self: Handle, **kw: object) -> StopReport:
        report = await stop(self, **kw)  # type: ignore[arg-type]
        return (
            replace(report, survivors=("4711 VLLM::EngineCor, stuck in the kernel (state D)",)) if stuck[0] else report
        )

    monkeypatch.setattr(Handle, "stop", stubborn)
    podwatch.see(18, finding=death())
    await podwatch.until_phase(Phase.BLOCKED)
    (finding,) = [f for f in podwatch.recovery.findings() if f.kind is FindingKind.BLOCKED]
    assert "4711 VLLM::EngineCor" in finding.summary
    assert "state D" in finding.summary
    assert len(world.plans) == 1
    stuck[0] = False
    await podwatch.until(Phase.CONFIRMING)
    assert len(world.plans) == 2
    assert not [f for f in podwatch.recovery.findings() if f.kind is FindingKind.BLOCKED]
    await podwatch.leave()


@pytest.mark.root
def test_they_are_removed_with_the_rights_of_their_user(tmp_path: Path) -> None:
    """What lies in a directory of root's in it stays: the user could not have removed it."""
    enterable(tmp_path)
    stale = tmp_path / "vllm-1"
    (stale / "closed").mkdir(parents=True)
    (stale / "closed" / "file").touch()
    own(stale, T)
    os.chown(stale / "closed", 0, 0)
    tmp_path.chmod(0o1777)
    assert clear_stale(T, time.time() - 60, [(tmp_path, "vllm-*")]) == ()
    assert (stale / "closed" / "file").exists()
    own(stale, T)
    if stale_files.find_stale(T, time.time() - 60, [(tmp_path, "vllm-*")]).unseen:
        pytest.skip("processes here may not be looked into")
    assert clear_stale(T, time.time() - 60, [(tmp_path, "vllm-*")]) == (stale,)
