"""Directories as nobody would leave them: foreign names, links, pipes, sockets, other people's files, thousands of
them. Never a traceback, never complete for a broken set, never a step that is none."""

import ast
import ctypes
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drivers.checkpoints import (
    LAYOUTS,
    CheckpointSet,
    Completeness,
    catalogue_of,
    one_reader,
    open_layout,
    recognised,
    without_the_parents_reader,
)
from tests.support.checkpoints import ManualClock
from tests.support.golden import GOLDENS, LONG, SOME, Golden, files_of, shift

pytestmark = pytest.mark.slow

each = pytest.mark.parametrize("golden", SOME, ids=lambda g: g.name)
ONE_EACH = tuple({g.kind: g for g in SOME}.values())
one_each = pytest.mark.parametrize("golden", ONE_EACH, ids=lambda g: g.name)


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    with one_reader():
        yield


class Bench:
    def __init__(self, golden: Golden, out: Path) -> None:
        self.layout, self.clock = golden.make(out), ManualClock()
        self.catalogue = catalogue_of(self.layout, self.clock, settle=5, settle_weak=60)

    def look(self) -> dict[int, CheckpointSet]:
        """Everything has had its time."""
        for _ in range(3):
            self.catalogue.rescan()
            self.clock.advance(10_000)
        return {s.step: s for s in self.catalogue.rescan()}

    def complete(self) -> list[int]:
        return [s.step for s in self.look().values() if s.complete]


def step_directories(golden: Golden, out: Path, step: int) -> list[Path]:
    """The topmost directories (or the file) that carry the step's name."""
    found = [p for p in sorted(out.rglob("*")) if golden.belongs(step, str(p.relative_to(out)))]
    return [p for p in found if not any(q in found for q in p.parents)]


@each
def test_foreign_names_beside_the_steps(golden: Golden, tmp_path: Path) -> None:
    """What people, backup tools, restores and other programs leave: none of it is a step, none hides one."""
    out = tmp_path / "out"
    golden.copy(out)
    for top in step_directories(golden, out, golden.steps[0]):
        parent, name = top.parent, top.name
        for foreign in (
            f"{name}.bad",
            f"{name} (copy)",
            f".{name}",
            f"{name}~",
            "latest_step",
            ".tmpAb12cD",
            "tmp-" + name,
        ):
            if top.suffix != ".ckpt":  # single files are told by their suffix alone
                (parent / foreign).mkdir(exist_ok=True)
                (parent / foreign / "x").write_bytes(b"x")
        (parent / ".tmpZz9_8x").write_bytes(bytes(1000))
        (parent / "step_").mkdir(exist_ok=True)
        (parent / "nothing-latest").symlink_to(name)
        (parent / "line\nbreak").mkdir()
        (Path(os.fsdecode(os.fsencode(parent) + b"/\xff\xfe-step"))).mkdir()
        (parent / ("step_" + "9" * 40)).mkdir()
    bench = Bench(golden, out)
    assert bench.complete() == list(golden.steps)
    assert all(s in (*golden.steps, *golden.others) or not f.complete for s, f in bench.look().items())


@each
def test_foreign_things_inside_a_set(golden: Golden, tmp_path: Path) -> None:
    """A pipe, a socket, a dangling and an escaping link, odd names: never opened, never followed, never uploaded."""
    out = tmp_path / "out"
    golden.copy(out)
    (tmp_path / "secret").write_bytes(b"not ours")
    step = golden.steps[-1]
    added = 0
    sockets = []
    for top in step_directories(golden, out, step):
        if not top.is_dir():
            continue
        os.mkfifo(top / "pipe.pt")
        (top / "dangling.safetensors").symlink_to("nowhere")
        (top / "escaping.pt").symlink_to("../../../../secret")
        (top / "absolute.pt").symlink_to(tmp_path / "secret")
        (top / "up").symlink_to("..")
        here = Path.cwd()
        os.chdir(top)  # a socket's path may have 107 bytes
        try:
            server = socket.socket(socket.AF_UNIX)
            server.bind("s.sock")
            sockets.append(server)
        finally:
            os.chdir(here)
        (top / os.fsdecode(b"\xff\xfe.txt")).write_bytes(b"odd")
        (top / "new\nline.txt").write_bytes(b"odd")
        added += 1
    shift(out, -7200)
    bench = Bench(golden, out)
    began = time.monotonic()
    found = bench.look()
    assert time.monotonic() - began < 20, "a pipe was opened"
    if step in found and added:
        contents = bench.catalogue.contents(step)
        names = {f.path.rsplit("/", 1)[-1] for f in contents.files}
        assert not names & {"pipe.pt", "dangling.safetensors", "escaping.pt", "absolute.pt", "s.sock"}
        targets = {link.target for link in contents.symlinks}
        assert not any(t.startswith(("/", "../../..")) for t in targets)
        bench.catalogue.verify(step)
    for server in sockets:
        server.close()


@one_each
@pytest.mark.parametrize("kind", ["directory", "pipe", "link away", "dangling link", "socket", "device"])
def test_something_else_where_a_file_belongs(golden: Golden, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    layout = golden.copy(out)
    step = golden.steps[-1]
    files = [p for p in files_of(layout, step) if p.suffix in (".pt", ".distcp", ".safetensors", ".bin", ".ckpt")]
    files = files or [p for p in files_of(layout, step) if p.name == "manifest.ocdbt"]
    victim = max(files, key=lambda p: p.stat().st_size)
    saved = victim.rename(tmp_path / "elsewhere")
    if kind == "directory":
        victim.mkdir()
    elif kind == "pipe":
        os.mkfifo(victim)
    elif kind == "link away":
        victim.symlink_to(saved)
    elif kind == "dangling link":
        victim.symlink_to("nowhere")
    elif kind == "device":
        if os.geteuid() != 0:
            pytest.skip("making a device needs root")
        try:
            os.mknod(victim, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("this container may not make devices")
    else:
        here = Path.cwd()
        os.chdir(victim.parent)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(victim.name)
        finally:
            os.chdir(here)
    found = Bench(golden, out).look()
    assert step not in found or not found[step].complete
    if step in found:
        assert found[step].reason


@one_each
def test_a_link_in_the_place_of_a_step_or_a_root(golden: Golden, tmp_path: Path) -> None:
    """A step directory that is a link to another place is no step; the output directory itself may be one."""
    out, step = tmp_path / "out", golden.steps[-1]
    golden.copy(out)
    for number, top in enumerate(step_directories(golden, out, step)):
        moved = top.rename(tmp_path / f"moved{number}")
        top.symlink_to(moved)
    found = Bench(golden, out).look()
    assert step not in found or not found[step].complete
    if len(golden.steps) > 1:
        assert golden.steps[0] in Bench(golden, out).complete()
    shutil.rmtree(out)
    golden.copy(out)
    (tmp_path / "link").symlink_to(out)
    assert Bench(golden, tmp_path / "link").complete() == list(golden.steps)


@pytest.mark.parametrize("golden", ONE_EACH if LONG else ONE_EACH[:1], ids=lambda g: g.name)
def test_ten_thousand_files(golden: Golden, tmp_path: Path) -> None:
    """Beside the steps, as many programs leave them; the next look costs what changed."""
    out = tmp_path / "out"
    layout = golden.copy(out)
    for root in {*layout.watch_roots(), layout.output_dir}:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(10_000 // (1 + len(layout.watch_roots()))):
            os.mknod(root / f"rollout_{number:05d}.txt")
    bench = Bench(golden, out)
    assert bench.complete() == list(golden.steps)
    began = time.process_time()
    bench.catalogue.rescan()
    assert time.process_time() - began < 1.0


def test_ten_thousand_files_in_one_step(tmp_path: Path) -> None:
    golden = next(g for g in GOLDENS if g.name == "runner")
    layout = golden.copy(tmp_path / "out")
    top = step_directories(golden, tmp_path / "out", 6)[0]
    for number in range(10_000):
        os.mknod(top / f"part_{number:05d}")
    shift(tmp_path / "out", -7200)
    catalogue = catalogue_of(layout, ManualClock(), settle=5, settle_weak=60)
    began = time.monotonic()
    catalogue.rescan()
    assert time.monotonic() - began < 10


@each
def test_files_that_may_not_be_read(golden: Golden, tmp_path: Path) -> None:
    """Unreadable says nothing about the set: never complete, never damaged, so nobody removes it."""
    out = tmp_path / "out"
    layout = golden.copy(out)
    step = golden.steps[-1]
    for path in files_of(layout, step):
        path.chmod(0o000)
    state, reason = without_privilege(golden, out).get(step, ("", ""))
    assert state in ("", Completeness.WRITING.value), (state, reason)


@one_each
def test_a_directory_that_may_not_be_read(golden: Golden, tmp_path: Path) -> None:
    out = tmp_path / "out"
    golden.copy(out)
    step = golden.steps[-1]
    tops = [t for t in step_directories(golden, out, step) if t.is_dir()]
    for top in tops:
        top.chmod(0o000)
    try:
        state, reason = without_privilege(golden, out).get(step, ("", ""))
    finally:
        for top in tops:
            top.chmod(0o755)
    if tops:
        assert state in ("", Completeness.WRITING.value), (state, reason)


def without_privilege(golden: Golden, out: Path) -> dict[int, tuple[str, str]]:
    """States by step, as a process sees them that has to obey file modes (root has to give up two capabilities)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            obey_modes()
            without_the_parents_reader()
            states = {s: (f.completeness.value, f.reason) for s, f in Bench(golden, out).look().items()}
            os.write(writer, repr(states).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the look raised"
    return dict(ast.literal_eval(answer.decode()))


def obey_modes() -> None:
    """Give up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, for this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; refused where we do not have it anyway
        for word in range(3):
            data[word] &= ~(1 << capability)
    libc.capset(header, data)


@one_each
def test_everything_vanishes_between_two_looks(golden: Golden, tmp_path: Path) -> None:
    out = tmp_path / "out"
    golden.copy(out)
    bench = Bench(golden, out)
    assert bench.complete() == list(golden.steps)
    subprocess.run(["rm", "-rf", str(out)], check=True)
    assert bench.look() == {}
    assert not bench.catalogue.saving


@pytest.mark.parametrize("kind", sorted(set(LAYOUTS) - {"custom"}))
@pytest.mark.parametrize("what", ["absent", "file", "pipe", "empty", "dangling link", "full of steps that are files"])
def test_an_output_directory_that_is_none(kind: str, what: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_bytes(b"")
    elif what == "pipe":
        os.mkfifo(out)
    elif what == "dangling link":
        out.symlink_to("nowhere")
    elif what != "absent":
        out.mkdir()
    if what.startswith("full"):
        for name in (
            "step_5",
            "checkpoint-5",
            "step-5",
            "global_step_5",
            "iter_0000005",
            "5",
            "global_step5",
            "x.ckpt",
        ):
            (out / name).write_bytes(b"")
        for place in ("checkpoints", "_actor", "checkpoint", "training_state"):
            (out / place).symlink_to(".")
    layout = open_layout(kind, out)
    catalogue = catalogue_of(layout, ManualClock(), settle=5, settle_weak=60)
    assert not any(s.complete for s in catalogue.rescan())
    assert layout.progress() is not None
    layout.ahead_of(None), layout.ahead_of(3), layout.pinned(), layout.trackers(3), layout.spare_paths(3)
    layout.target_step(()), layout.watch_roots(), layout.log_globs(), layout.wandb_identity()
    recognised(out)


@pytest.mark.skipif(LONG, reason="all are here")
def test_the_other_fixtures() -> None:
    pytest.skip("the other fixtures: PODWATCH_LONG_TESTS=1, as `make test-torch` does")
