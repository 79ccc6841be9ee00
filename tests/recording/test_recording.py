"""What was sensed comes back as it was, and no file and no disk can hurt the one who reads or writes it."""

import gzip
import json
import math
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.config.settings import GpuSettings, HangSettings, InferenceSettings, Policies, TrainingHealthSettings
from podwatch.detection.learned import Learned
from podwatch.domain.errors import HostError, UsageError
from podwatch.domain.process import ExitStatus, ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.snapshot import (
    CheckpointMark,
    DiskSample,
    GpuSample,
    HostSample,
    InferenceSample,
    LogMatch,
    ProgressSample,
    Reading,
    SensorState,
    Snapshot,
    TrainerSample,
    TrainingMetrics,
    observed,
    unobserved,
)
from podwatch.domain.trainer_log import LogRule
from podwatch.recording import recorder as recording_module
from podwatch.recording.codec import FREE_TEXT, Turns, change
from podwatch.recording.format import (
    Header,
    Segment,
    SegmentWriter,
    read_recording,
    write_recording,
)
from podwatch.recording.recorder import Recorder

pytestmark = pytest.mark.slow

NUMBERS = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
st.register_type_strategy(float, NUMBERS)
st.register_type_strategy(str, TEXT)


def readings(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Reading[Any]]:
    return st.builds(Reading, state=st.sampled_from(SensorState), at=NUMBERS, value=st.none() | value, detail=TEXT)


def several(kind: type) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.builds(kind, **everything(kind)), max_size=3).map(tuple)


def everything(kind: type) -> dict[str, Any]:
    """Also the fields with a default: ``builds`` leaves those alone."""
    return {f.name: ... for f in fields(kind)}


SNAPSHOTS = st.builds(
    Snapshot,
    at=NUMBERS,
    wall=NUMBERS,
    gpus=readings(several(GpuSample)),
    trainer=readings(st.builds(TrainerSample, **everything(TrainerSample))),
    disk=readings(st.builds(DiskSample, **everything(DiskSample))),
    inference=readings(several(InferenceSample)),
    progress=readings(several(ProgressSample)),
    saving=...,
    desired=...,
    host=readings(st.builds(HostSample, **everything(HostSample))),
    logs=readings(several(LogMatch)),
    training=readings(several(TrainingMetrics)),
    disks=readings(several(DiskSample)),
    checkpoint=st.builds(CheckpointMark, **everything(CheckpointMark)),
    boot_at=st.none() | NUMBERS,
)


def test_the_strategy_knows_every_field_of_a_snapshot() -> None:
    """A reading added later must not go unproved."""
    assert {f.name for f in fields(Snapshot)} == {
        "at", "wall", "gpus", "trainer", "disk", "inference", "progress", "saving", "desired", "host", "logs",
        "training", "checkpoint", "boot_at", "disks",
    }  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(SNAPSHOTS, min_size=1, max_size=4), st.data())
def test_any_turns_come_back_equal(turns: list[Snapshot], data: st.DataObject) -> None:
    # Neighbours that share readings are the usual case: mix the fields of those that were drawn.
    for n in range(1, len(turns)):
        shared = data.draw(st.sets(st.sampled_from([f.name for f in fields(Snapshot)])))
        turns[n] = replace(turns[n], **{name: getattr(turns[n - 1], name) for name in shared})
    assert list(read_again(turns)) == turns


def read_again(turns: Sequence[Snapshot]) -> Iterator[Snapshot]:
    found = Turns()
    for before, turn in zip([None, *turns], turns, strict=False):
        yield found.next(json.dumps(change(before, turn), allow_nan=False).encode("ascii"))


def gpu(index: int = 0, **more: Any) -> GpuSample:
    return GpuSample(index, f"GPU-{index}", "H200", memory_used_bytes=60 << 30, **more)


def process(pid: int, state: str = "S", command: str = "python") -> ProcessSample:
    return ProcessSample(ProcessIdentity(pid, 1), 1, "python", command, ProcessRole.OTHER, state)


def turn(n: int, **more: Any) -> Snapshot:
    values = {"gpus": observed((gpu(),), 100.0 + 2 * n)} | more
    return Snapshot(at=100.0 + 2 * n, wall=1.7e9 + 2 * n, **values)


@given(st.lists(st.integers(0, 9), max_size=8), st.lists(st.integers(0, 9), max_size=8))
def test_a_tree_that_grows_and_shrinks(before: list[int], after: list[int]) -> None:
    old, new = (
        turn(0, trainer=observed(TrainerSample(descendants=tuple(map(process, p))), 1.0)) for p in (before, after)
    )
    assert list(read_again([old, new])) == [old, new]


def test_only_what_changed_is_written() -> None:
    tree = tuple(process(n) for n in range(200))
    old = turn(0, trainer=observed(TrainerSample(descendants=tree), 100.0))
    busy = (*tree[:7], process(7, "R"), *tree[8:])
    new = turn(1, trainer=observed(TrainerSample(descendants=busy), 102.0))
    assert change(old, new) == {
        "at": 102.0,
        "wall": 1.7e9 + 2,
        "gpus": {"at": 102.0},
        "trainer": {"at": 102.0, "value": {"descendants": {"7": {"state": "R"}}}},
    }
    gone = turn(1, trainer=observed(TrainerSample(descendants=tree[:5] + tree[6:]), 100.0))
    assert change(old, gone)["trainer"] == {"value": {"descendants": {"~": [5, 194, []]}}}


def test_a_file_of_turns(tmp_path: Path) -> None:
    header = Header(
        "run", "prime-rl", "s", 5.0, 2.0,
        Policies(gpu=GpuSettings(inference=(0, 3)), log_rules=(LogRule("a", "b"),)),
        Learned(gpu_baseline_bytes=((0, 7),), seen=("gpu0",), start_id="x"),
    )  # fmt: skip
    turns = [turn(n) for n in range(5)]
    path = tmp_path / "night.jsonl.gz"
    assert write_recording(path, header, turns) == 5
    (segment,) = read_recording(path)
    assert segment.header == header
    assert (list(segment), segment.problem, segment.torn) == (turns, "", False)
    # zcat can read it, and so can we what zcat wrote
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    assert list(Segment(plain)) == turns
    assert path.stat().st_mode & 0o077 == 0


def test_a_recording_holds_no_address_and_no_path_of_the_metrics() -> None:
    training = TrainingHealthSettings(metrics_file="/home/s3same/metrics.jsonl", kl_above=0.3)
    server = InferenceSettings(urls=("http://me:s3same@127.0.0.1:8000",), sleep="yes")
    policies = Policies(training=training, inference=server, hang=HangSettings(k=math.inf))
    text = json.dumps(Header("r", policies=policies).to_json(), allow_nan=False)
    assert "s3same" not in text
    read = Header.from_bytes(text.encode()).policies
    assert (read.training.kl_above, read.hang, read.inference.sleep) == (0.3, policies.hang, "yes")


def test_fields_of_a_later_version_are_ignored_and_missing_ones_take_their_default() -> None:
    data = change(None, turn(0))["="]
    data["weather"] = {"state": "ok"}
    data["gpus"]["value"][0]["smell"] = "burnt"
    del data["boot_at"], data["host"], data["gpus"]["value"][0]["mig"]
    turns = Turns()
    assert turns.next(json.dumps({"=": data})) == turn(0)
    later = {"weather": {"state": "dull"}, "gpus": {"at": 102.0, "colour": 2}, "at": 102.0}
    assert turns.next(json.dumps(later)) == replace(turn(0), at=102.0, gpus=replace(turn(0).gpus, at=102.0))
    header = Header("run").to_json()
    policies = header["policies"]
    policies["hang"]["new"] = policies["training"]["new"] = policies["new"] = header["new"] = 1
    del policies["resources"], header["learned"], header["poll"]
    assert Header.from_json(header) == Header("run")


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"7",
        b'{"at":"soon"}',
        b'{"at":true}',
        b'{"at":"nan"}',
        b'{"wall":1e300}',
        b'{"at":-1e308}',
        b'{"boot_at":1e300}',
        b'{"at":' + b"9" * 5000 + b"}",
        b'{"gpus":{"state":"enchanted"}}',
        b'{"gpus":{"value":{"17":{"index":1}}}}',
        b'{"gpus":{"value":{"-1":{"index":1}}}}',
        b'{"gpus":{"value":{"~":[5,5,[]]}}}',
        b'{"gpus":{"value":{"~":[-1,0,[]]}}}',
        b'{"gpus":{"value":{"0":{"memory_used_bytes":1.5}}}}',
        b'{"gpus":{"value":{"0":{"memory_used_bytes":"7"}}}}',
        b'{"gpus":{"value":{"0":{"mig":1}}}}',
        b'{"saving":{"#":"inf"}}',
        b'{"at":{"#":"7"}}',
        b'{"at":NaN}',
        b'{"=":{"wall":1.0}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_does_not_fit_ends_the_segment_there(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl.gz"
    write_recording(path, Header("run"), [turn(0), turn(1)])
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + line + b"\n" + b'{"at":900.0}\n'))
    segment = Segment(path)
    assert list(segment) == [turn(0), turn(1)]
    assert segment.problem.startswith("line 4 cannot be read")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_leaves_the_turns_before_it(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.unlink(missing_ok=True)
    turns = [turn(n, saving=bool(n % 3)) for n in range(40)]
    writer = SegmentWriter(path, Header("run"))
    for one in turns:
        writer.turn(one)
        writer.flush()
    writer.close()
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(2, len(raw) - 1))
    if data.draw(st.booleans()):
        raw = raw[:at]
    else:
        raw[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(raw)
    try:
        segment = Segment(path)
        back = list(segment)
    except UsageError:
        return
    if back != turns[: len(back)]:  # a flipped byte can stand for another number; the check sum at the end tells
        assert segment.problem


def test_a_torn_last_line_is_dropped_and_said(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    write_recording(tmp_path / "a.gz", Header("run"), [turn(0), turn(1)])
    path.write_bytes(gzip.decompress((tmp_path / "a.gz").read_bytes())[:-9])
    segment = Segment(path)
    assert list(segment) == [turn(0)]
    assert segment.torn


def test_a_small_file_that_unpacks_into_a_huge_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = json.dumps(Header("run").to_json()).encode() + b"\n"
    (tmp_path / "line.gz").write_bytes(gzip.compress(head + b" " * (9 << 20)))
    segment = Segment(tmp_path / "line.gz")
    assert list(segment) == []
    assert "larger than any recording" in segment.problem
    monkeypatch.setattr("podwatch.recording.format.MAX_SEGMENT", 1 << 17)
    whole = json.dumps(change(None, turn(0))).encode() + b"\n"
    (tmp_path / "lines.gz").write_bytes(gzip.compress(head + whole + b"{}\n" * 100_000))
    segment = Segment(tmp_path / "lines.gz")
    assert 0 < sum(1 for _ in segment) < 70_000
    assert "larger than any recording" in segment.problem


@pytest.mark.parametrize("content", [b"", b"hello\n", b"{}\n", b'{"schema_version":1}\n', gzip.compress(b"", mtime=0)])
def test_what_is_no_recording(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not a recording") as caught:
        Segment(path)
    assert caught.value.where == str(path)
    assert caught.value.fix


def test_a_recording_of_a_later_podwatch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(Header("run").to_json() | {"schema_version": 2}) + "\n")
    with pytest.raises(UsageError, match="schema_version 2") as caught:
        Segment(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize(
    "change",
    [
        {"wall": 1e300}, {"wall": float("nan")}, {"wall": "x"}, {"wall": True}, {"poll": -1.0}, {"poll": []},
        {"run_id": None}, {"run_id": "a\x1b[2Jb"}, {"run_id": "x" * 201}, {"session": {}}, {"version": ["9.1"]},
        {"policies": []}, {"policies": {"hang": {"k": "many"}}}, {"policies": {"gpu": {"inference": [[0]]}}},
        {"policies": {"log_rules": [{"name": "a"}]}}, {"schema_version": True}, {"layout": "x" * (2 << 20)},
    ],
)  # fmt: skip
def test_a_header_with_a_wrong_value_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(Header("run").to_json() | change) + "\n")
    with pytest.raises(UsageError, match="header of this recording") as caught:
        Segment(path)
    assert caught.value.fix


@pytest.mark.parametrize(
    "more", ['"run_id":"other",', '"deep":' + "[" * 5000 + "]" * 5000 + ",", '"deep":' + "[" * 5000]
)
def test_a_header_with_a_key_twice_or_too_deep_is_refused(tmp_path: Path, more: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(Header("run").to_json()).replace("{", "{" + more, 1) + "\n")
    with pytest.raises(UsageError, match="header of this recording"):
        Segment(path)


@pytest.mark.parametrize("learned", [None, 7, {"seen": 1}, {"step_seconds": ["x"]}])
def test_learned_values_that_cannot_be_read_leave_the_recording(tmp_path: Path, learned: object) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(Header("run").to_json() | {"learned": learned}) + "\n")
    assert Segment(path).header == Header("run")


def test_things_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(HostError, match="not a regular file"):
        Segment(tmp_path / "fifo")
    with pytest.raises(UsageError, match="recording not found"):
        list(read_recording(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no recording found"):
        list(read_recording(tmp_path / "empty"))


def test_free_text_goes_through_the_mask_and_nothing_else_does(tmp_path: Path) -> None:
    one = turn(
        0,
        gpus=observed((gpu(detail="SECRET"),), 1.0),
        trainer=observed(
            TrainerSample(start_id="SECRET", descendants=(process(1, command="x --api-key SECRET"),)), 1.0
        ),
        inference=unobserved(SensorState.BLIND, 1.0, "http://u:SECRET@host is down"),
        logs=observed((LogMatch("rule", "trainer", 1, 1.0, 1.0, "SECRET"),), 1.0),
    )
    path = tmp_path / "a.gz"
    write_recording(path, Header("run"), [turn(9), one], lambda text: text.replace("SECRET", "***"))
    text = gzip.decompress(path.read_bytes()).decode()
    assert text.count("SECRET") == 1  # start_id: an identifier, which must stay what it is
    assert text.count("***") == 4
    named = {
        f"{kind.__name__}.{f.name}" for kind in (ProcessSample, LogMatch, Reading, GpuSample) for f in fields(kind)
    }
    assert {name for name in FREE_TEXT if name.split(".")[0] in ("ProcessSample", "LogMatch", "Reading")} <= named


def test_a_command_line_is_bytes() -> None:
    """Half a character, as an argument can contain, is written as what JSON has."""
    odd = turn(0, trainer=observed(TrainerSample(descendants=(process(1, command="a\udc80b"),)), 1.0))
    (found,) = read_again([odd])
    assert found.trainer.value is not None
    assert found.trainer.value.descendants[0].command == "a\ufffdb"


def test_a_recording_begins_with_a_whole_turn() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        Turns().next('{"at": 1.0}')


# -- the recorder


def recorded(directory: Path) -> list[Segment]:
    return list(read_recording(directory))


def everything_in(directory: Path) -> list[Snapshot]:
    return [snapshot for segment in recorded(directory) for snapshot in segment]


def exit_status(n: int) -> Reading[TrainerSample]:
    return observed(TrainerSample(start_id=f"start{n}", exit=ExitStatus(code=n)), float(n))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    made = []

    def build(**more: Any) -> Recorder:
        recorder = Recorder(tmp_path / "r", lambda: Header("run"), **({"max_size": 1 << 20} | more))
        made.append(recorder)
        return recorder

    yield build
    for recorder in made:
        recorder.close()


def test_the_recorder_keeps_every_turn_over_its_own_restart(make: Callable[..., Recorder], tmp_path: Path) -> None:
    for begin in (0, 10):
        recorder = make()
        for n in range(begin, begin + 10):
            recorder.turn(turn(n))
        assert recorder.close(within=60)
        recorder.turn(turn(99))  # after the end: nothing
    first, second = recorded(tmp_path / "r")
    assert [*first, *second] == [turn(n) for n in range(20)]
    assert first.header.session != second.header.session
    assert second.header.wall == turn(10).wall
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0


def test_a_recorder_that_is_killed_loses_seconds_only(tmp_path: Path) -> None:
    code = """
import sys, os, time
from pathlib import Path
from podwatch.recording.recorder import Recorder
from podwatch.recording.format import Header
from podwatch.domain.snapshot import Snapshot
recorder = Recorder(Path(sys.argv[1]), lambda: Header("run"), max_size=1 << 20)
for n in range(40):
    recorder.turn(Snapshot(2.0 * n, 1e9 + 2 * n))
while not recorder._waiting.empty():
    time.sleep(0.01)
time.sleep(0.05)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], timeout=30)
    (segment,) = recorded(tmp_path / "r")
    assert 35 <= len(list(segment)) <= 40
    assert segment.problem == ""


def test_it_stays_within_its_size_and_drops_the_oldest(make: Callable[..., Recorder], tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "00000000-mine.txt").write_text("x" * 100_000)
    recorder = make(max_size=64_000)
    for n in range(3000):
        noise = tuple(process(pid, command=os.urandom(60).hex()) for pid in range(3))
        recorder.turn(turn(n, trainer=observed(TrainerSample(descendants=noise), 1.0)))
        while recorder._waiting.qsize() > 100:
            time.sleep(0.001)
    assert recorder.close(within=60)
    segments = sorted((tmp_path / "r").glob("*.jsonl.gz"))
    assert sum(p.stat().st_size for p in segments) <= 64_000
    assert 10 <= len(segments) <= 17
    assert (tmp_path / "r" / "00000000-mine.txt").exists()
    kept = everything_in(tmp_path / "r")
    assert kept[-1].at == turn(2999).at
    assert [s.at for s in kept] == [turn(n).at for n in range(3000 - len(kept), 3000)]
    sessions = {s.header.session for s in recorded(tmp_path / "r")}
    assert len(sessions) == 1  # cut, not interrupted


def test_new_policies_begin_a_new_segment(make: Callable[..., Recorder], tmp_path: Path) -> None:
    recorder = make()
    recorder.turn(turn(0))
    recorder.cut()
    recorder.turn(turn(1))
    recorder.close()
    first, second = recorded(tmp_path / "r")
    assert (list(first), list(second)) == ([turn(0)], [turn(1)])
    assert first.header.session == second.header.session


def test_a_full_disk_stops_it_with_one_complaint_and_it_comes_back(
    make: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str | None] = []
    full = {"now": False}

    def room(_: Path) -> None:
        if full["now"]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording_module, "_room", room)
    recorder = make(complain=told.append)
    for n in range(1200):
        full["now"] = 100 <= n < 650  # tried again at about 400 and 700
        recorder.turn(turn(n))
        while not recorder._waiting.empty():
            time.sleep(0)
    assert recorder.close(within=60)
    assert len(told) == 2
    assert "No space left" in str(told[0])
    assert told[1] is None
    kept = everything_in(tmp_path / "r")
    assert kept[0] == turn(0)
    assert kept[-1] == turn(1199)
    assert 500 < len(kept) < 800
    assert len({s.header.session for s in recorded(tmp_path / "r")}) == 2


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    told: list[str | None] = []
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "r", lambda: Header("run"), max_size=1 << 20, complain=told.append)
    for n in range(5):
        recorder.turn(turn(n))
    assert recorder.close(within=60)
    assert len(told) == 1


def test_a_disk_that_hangs_costs_turns_and_nothing_else(
    make: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "MAX_WAITING", 5)
    hung, go_on = threading.Event(), threading.Event()
    real = SegmentWriter.turn

    def slow(self: SegmentWriter, snapshot: Snapshot) -> None:
        if snapshot == turn(3) and not go_on.is_set():
            hung.set()
            go_on.wait(30)
        real(self, snapshot)

    monkeypatch.setattr(SegmentWriter, "turn", slow)
    recorder = make()
    for n in range(4):
        recorder.turn(turn(n))
    assert hung.wait(30)
    began = time.monotonic()
    for n in range(4, 500):
        recorder.turn(turn(n))
    assert time.monotonic() - began < 5, "the disk hangs for longer"
    assert recorder.close(within=0.05) is False
    recorder._closing = False
    go_on.set()
    while not recorder._waiting.empty():
        time.sleep(0.001)
    assert len(everything_in(tmp_path / "r")) <= 10


def test_turns_that_were_left_out_end_the_session(
    make: Callable[..., Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording_module, "MAX_WAITING", 5)
    gate = threading.Event()
    real = SegmentWriter.turn

    def gated(self: SegmentWriter, snapshot: Snapshot) -> None:
        gate.wait(10)
        real(self, snapshot)

    monkeypatch.setattr(SegmentWriter, "turn", gated)
    recorder = make()
    for n in range(50):
        recorder.turn(turn(n))
    gate.set()
    while not recorder._waiting.empty():
        time.sleep(0.001)
    recorder.turn(turn(50))
    assert recorder.close(within=60)
    first, second = recorded(tmp_path / "r")
    assert [s.at for s in first] == [turn(n).at for n in range(len(list(Segment(first.path))))]
    assert list(second) == [turn(50)]
    assert first.header.session != second.header.session


def test_an_idle_hour_is_small(tmp_path: Path) -> None:
    """8 GPUs, 200 processes, 2 s: what a month of it costs on disk is what decides whether it can be on by default."""
    tree = tuple(process(n, command=f"python worker {n} " + "x" * 80) for n in range(200))
    writer = SegmentWriter(tmp_path / "a.gz", Header("run"))
    began = time.thread_time()
    for n in range(1800):
        at = 1000 + 2.000123 * n
        gpus = tuple(gpu(i, utilization_percent=float((n * 7 + i) % 100), temperature_celsius=60.0) for i in range(8))
        busy = n % 200
        now = (*tree[:busy], process(busy, "R", tree[busy].command), *tree[busy + 1 :])
        writer.turn(turn(n, gpus=observed(gpus, at), trainer=observed(TrainerSample("s", descendants=now), at + 0.01)))
        if n % 2 == 0:
            writer.flush()
    writer.close()
    spent = time.thread_time() - began
    print(f"{writer.written} bytes, {spent:.3f} s")
    assert writer.written < 400_000
    assert spent < 1800 * 0.004  # 0.2 % of a core at 2 s, on a slow machine
    assert zlib.decompress(writer.path.read_bytes(), zlib.MAX_WBITS | 16).count(b"\n") == 1801
