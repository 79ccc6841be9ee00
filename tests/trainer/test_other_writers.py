"""Who writes where our trainer does: who counts, who never does, and that ours never counts."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.process import PodProcess, ProcessIdentity
from podwatch.system import procfs
from podwatch.system.procfs import identify
from podwatch.trainer import other_writers
from podwatch.trainer.other_writers import (
    READ_EVERY,
    Other,
    Others,
    Run,
    Seen,
    in_checkpoint,
    judge,
    names,
    program_of,
    reads_only,
)
from tests.support.known_trainers import ROLES

OUT = "/work/out"
ROOTS = (f"{OUT}/checkpoints", OUT)
SAVING = f"{OUT}/checkpoints/step_40/trainer/__0_0.distcp"
LAUNCHER = ProcessIdentity(10, 100)


def seen(
    pid: int, argv: tuple[str, ...], *, parent: int = 1, cuda: bool | None = False, files: tuple[str, ...] = (),
    uid: int = 0, name: str = "", group: int = 0, session: int = 0,
) -> Seen:  # fmt: skip
    name = name or argv[0].rpartition("/")[2]
    role = ROLES.classify(name, argv)
    process = PodProcess(
        ProcessIdentity(pid, 10 * pid), parent, name, argv, cwd="/work", cuda=cuda, role=role, group=group or pid,
        session=session or pid,
    )  # fmt: skip
    return Seen(process, uid, files)


def found(*others: Seen, programs: frozenset[tuple[str, str]] = frozenset({("train.py", "")})) -> tuple[Other, ...]:
    ours = seen(10, ("python", "train.py", "--output_dir", OUT), cuda=True, files=(SAVING,), group=10, session=5)
    everything = {s.process.identity.pid: s for s in (ours, *others)}
    return judge(everything, Run(OUT, ROOTS, frozenset({LAUNCHER}), frozenset({0}), programs=programs))


SECOND = ("python", "train.py", "--output_dir", OUT)


def test_what_writes_a_checkpoint_counts_whatever_it_is_called() -> None:
    (other,) = found(seen(20, ("/x/anything",), files=(SAVING,), uid=999))
    assert (other.identity.pid, other.writes, other.sure) == (20, True, True)
    assert SAVING in other.reason


def test_a_context_and_output_dir_in_its_arguments_count() -> None:
    for argv in (SECOND, ("python", "other.py", f"--out={OUT}/"), ("torchrun", "x.py", "out")):
        (other,) = found(seen(20, argv, cuda=True))
        assert (other.writes, other.sure) == (True, True), argv


def test_the_same_program_counts_before_it_has_a_context_when_it_is_seen_twice() -> None:
    (other,) = found(seen(20, SECOND))
    assert (other.writes, other.sure) == (True, False)
    (other,) = found(seen(20, ("PRIME-RL::Launcher",), files=(f"{OUT}/logs/rl.log",)))
    assert (other.writes, other.sure) == (True, False)


@pytest.mark.parametrize(
    "one",
    [
        seen(20, ("tail", "-f", f"{OUT}/logs/rl.log")),
        seen(20, ("rsync", "-a", "/backup/", f"{OUT}/checkpoints"), files=(SAVING,)),
        seen(20, ("cp", "-r", "/backup", OUT), files=(SAVING,)),
        seen(20, ("python", "-m", "tensorboard.main", "--logdir", OUT)),
        seen(20, ("bash",), files=(f"{OUT}/logs/rl.log",)),
        seen(20, ("torchrun", "eval.py", "--output_dir", OUT), cuda=True, files=(f"{OUT}/eval.log",)),
        seen(20, ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", f"{OUT}/weights/step_4"), cuda=True),
        seen(20, ("vllm", "serve", OUT), cuda=True),
        seen(20, SECOND, cuda=True, name="VLLM::EngineCor"),
        seen(20, ("python", "train.py", "--output_dir", OUT, "--eval_only"), cuda=True),
        seen(20, ("python", "train.py", "--output_dir", "/work/another"), cuda=True, files=("/work/another/x",)),
        seen(20, ("python", "train.py", "--resume", f"{OUT}/checkpoints/step_40"), cuda=True),
        seen(20, SECOND, cuda=True, uid=1000),
        seen(20, ("torchrun", "notes.py"), files=(f"{OUT}/notes.log",)),
    ],
    ids=lambda one: " ".join(one.process.argv)[:40],
)
def test_readers_tools_and_strangers_never_count(one: Seen) -> None:
    assert not [other for other in found(one) if other.writes]


def test_one_that_only_names_output_dir_may_write() -> None:
    """It confirms no start of ours with its saves; it is no second writer yet."""
    (other,) = found(seen(20, ("python", "prepare.py", OUT)))
    assert not other.writes


def test_nothing_of_ours_counts() -> None:
    rank = seen(11, SECOND, parent=10, cuda=True, files=(SAVING,))
    worker = seen(12, SECOND, parent=11, cuda=True)
    orphan = seen(13, SECOND, cuda=True, files=(SAVING,), session=10)
    piped = seen(14, SECOND, cuda=True, group=10)
    assert found(rank, worker, orphan, piped) == ()


def test_what_started_ours_is_no_second_trainer() -> None:
    ours = seen(10, SECOND, parent=9, cuda=True)
    wrapper = seen(9, ("timeout", "10h", "python", "train.py", "--output_dir", OUT), parent=8, cuda=True)
    everything = {8: seen(8, SECOND, cuda=True), 9: wrapper, 10: ours}
    run = Run(OUT, ROOTS, frozenset({LAUNCHER}), frozenset({0}), programs=frozenset({("train.py", "")}))
    assert judge(everything, run) == ()


def test_a_tree_is_named_once_by_its_top() -> None:
    top = seen(20, ("torchrun", "train.py", "--output_dir", OUT), cuda=True)
    workers = [seen(n, SECOND, parent=20, cuda=True) for n in (21, 22)]
    assert [o.identity.pid for o in found(top, *workers)] == [20]
    saving = seen(23, ("python", "x"), parent=30, files=(SAVING,))
    assert [o.identity.pid for o in found(seen(30, ("python", "prepare.py", OUT)), saving)] == [23, 30]


parents = st.lists(st.integers(0, 30), min_size=31, max_size=31)


@given(parents, st.sets(st.integers(0, 30), max_size=8))
def test_below_ours_nothing_counts_in_any_tree(parent: list[int], writing: set[int]) -> None:
    """Also where parents form a loop: pids are read one after another and may be given anew."""
    pids = range(100, 131)
    tree = [
        seen(pid, SECOND, parent=10 if parent[n] == 0 else 100 + parent[n], cuda=n in writing)
        for n, pid in enumerate(pids)
    ]
    below = {10}
    for _ in pids:
        below |= {pid for n, pid in enumerate(pids) if (10 if parent[n] == 0 else 100 + parent[n]) in below}
    assert not below & {other.identity.pid for other in found(*tree)}


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        (SAVING, True),
        (f"{OUT}/checkpoint-500/optimizer.pt", True),
        (f"{OUT}/epoch=0-step=100.ckpt", True),
        (f"{OUT}/events.out.tfevents.1700000000.host", False),
        (f"{OUT}/logs/rank0.log", False),
        (f"{OUT}/train.log.1", False),
        ("/work/out2/step_4/x", False),
        (f"{OUT}/wandb/run-20260821/files/output.log", False),
    ],
)
def test_what_is_part_of_a_checkpoint(path: str, inside: bool) -> None:
    assert in_checkpoint(path, ROOTS) is inside


def test_programs_and_arguments() -> None:
    assert program_of(("uv", "run", "rl", "@", "x.toml")) == ("rl", "")
    assert program_of(("python", "/x/torchrun", "--nproc", "2", "a/train.py", "--x")) == ("torchrun", "train.py")
    assert program_of(("torchrun", "-m", "pkg.train")) == ("torchrun", "pkg.train")
    assert names(("x", "--output-dir=out"), "/work", OUT)
    assert not names(("x", f"{OUT}/checkpoints"), "/work", OUT)
    assert reads_only(("accelerate", "launch", "evaluate.py"))
    assert not reads_only(("python", "train.py", "--do_train", "--do_eval"))


# -- real processes


@contextlib.contextmanager
def child(*argv: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-S", *argv], start_new_session=True)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def until(check: object, look: object) -> None:
    end = time.monotonic() + 60
    while not check(look()):  # type: ignore[operator]
        assert time.monotonic() < end, look()  # type: ignore[operator]
        time.sleep(0.02)


def test_real_processes_are_found_while_they_write_and_no_longer(tmp_path: Path) -> None:
    out = tmp_path / "out"
    step = out / "checkpoints" / "step_40"
    step.mkdir(parents=True)
    code = "import sys, time\nf = open(sys.argv[1], 'w')\nsys.stdin.read()\n"
    script = tmp_path / "save.py"
    script.write_text(code)
    me = identify(os.getpid())
    assert me is not None
    with child("-c", "import time; time.sleep(600)") as launcher:
        ours = identify(launcher)
        assert ours is not None
        run = Run(str(out), (str(out / "checkpoints"),), frozenset({ours}), frozenset({os.geteuid()}))
        others = Others(ROLES)
        assert others.look(run) == ()
        process = subprocess.Popen(
            [sys.executable, "-S", str(script), str(step / "x.distcp")], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            until(lambda seen: [o.identity.pid for o in seen if o.writes] == [process.pid], lambda: others.look(run))
            assert [o.identity.pid for o in others.look(run)] == [process.pid], "it did nothing since, and still has it"
        finally:
            process.communicate()
        until(lambda seen: seen == (), lambda: others.look(run))


def test_what_carries_the_marker_of_this_start_is_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run = Run(str(out), (str(out),), frozenset({ProcessIdentity(1, 1)}), frozenset({os.geteuid()}))
    argv = [sys.executable, "-S", "-c", "import time; time.sleep(600)", "--output_dir", str(out)]
    process = subprocess.Popen(argv, env={**os.environ, "PODWATCH_START_ID": "s1"}, start_new_session=True)
    try:
        until(lambda seen: [o.identity.pid for o in seen] == [process.pid], lambda: Others(ROLES).look(run, "s2"))
        assert Others(ROLES).look(run, "s1") == ()
    finally:
        process.kill()
        process.wait()


def test_threads_of_the_kernel_are_not_read_at_each_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without containers has dozens; a process that gets the pid of one is found within READ_EVERY looks."""
    read: list[int] = []
    mine = procfs.stat_line(os.getpid())
    threads = dict.fromkeys(range(3, 60), b"%d (kworker/0:1) S 2 0 0 0 -1 69238880" + b" 0" * 42)
    lines = {pid: line % pid for pid, line in threads.items()}
    monkeypatch.setattr(other_writers.procfs, "all_pids", lambda: sorted(lines))
    monkeypatch.setattr(other_writers.procfs, "stat_line", lambda pid: read.append(pid) or lines[pid])
    run = Run(str(tmp_path), (str(tmp_path),), frozenset({ProcessIdentity(1, 1)}), frozenset({os.geteuid()}))
    others = Others(ROLES)
    others.look(run)
    assert sorted(read) == sorted(lines)
    read.clear()
    others.look(run)
    assert len(read) <= len(lines) / 6
    lines[30] = mine
    for _ in range(READ_EVERY):
        read.clear()
        others.look(run)
        if 30 in read:
            break
    assert 30 in read
    read.clear()
    others.look(run)
    assert 30 in read, "it is no thread of the kernel any more"
