"""Every parser against damaged and invented input: an answer or a refusal, never an exception that was not promised,
never much memory or time. ``HYPOTHESIS_PROFILE=long`` tries 25 times as many.
"""

import contextlib
import errno
import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podwatch.checkpoints.formats import safetensors, torch_zip, unpickler
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.scan import scan_part
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import layout_of, recognised
from tests.drivers.checkpoints import Inspection, file_problem, judge, one_reader, open_layout, values_in_torch_file
from tests.support.golden import GOLDEN

pytestmark = pytest.mark.slow

MORE = 25.0 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 0.5
"""Times the count of each test: the default run has seconds for all of them, ``make fuzz`` has minutes."""


def tries(count: int) -> Callable[..., object]:
    """The same inputs every time, so that a red run can be repeated."""
    return settings(
        max_examples=int(count * MORE), derandomize=True, database=None, deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def reader() -> Iterator[None]:
    with one_reader():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.fixture
def bounded() -> Iterator[None]:
    """No more memory than the inputs' hundredfold: a length field is never believed before it is checked."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, f"{peak >> 20} MiB"


def damaged(*originals: bytes) -> st.SearchStrategy[bytes]:
    """One of the originals with a few bytes changed, cut out, repeated, or put in."""

    def apply(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
        for kind, place, new in edits:
            at = int(place * max(0, len(data) - 1))
            if kind == "set":
                data = data[:at] + new + data[at + len(new) :]
            elif kind == "insert":
                data = data[:at] + new + data[at:]
            elif kind == "cut":
                data = data[:at] + data[at + len(new) :]
            elif kind == "end":
                data = data[:at]
            else:
                data = data[:at] + data[at : at + 40] * 3 + data[at:]
        return data

    edit = st.tuples(
        st.sampled_from(["set", "insert", "cut", "end", "repeat"]),
        st.floats(0, 1),
        st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 3])),
    )
    return st.builds(apply, st.sampled_from(originals), st.lists(edit, min_size=1, max_size=4))


# -- single files -----------------------------------------------------------------------------------------------------

SAFETENSORS = [(GOLDEN / f"safetensors-{v}" / f"{v}.safetensors").read_bytes() for v in ("0.4.5", "0.8.0")]
TORCH = [(GOLDEN / "torch-files" / n).read_bytes() for n in ("crc.pt", "no-crc.pt", "legacy.pt", "empty-dict.pt")]
DCP_INDEX = (GOLDEN / "hf-fsdp" / "checkpoint-2" / "pytorch_model_fsdp_0" / ".metadata").read_bytes()
JSON_KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "weight_map", "global_step", "__metadata__", "w", ""])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["F32", "BF16", "../x", "/abs", "a.safetensors"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(JSON_KEYS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@tries(60)
@given(data=damaged(*SAFETENSORS) | st.binary(max_size=200))
def test_safetensors_bytes(file: Path, bounded: None, data: bytes) -> None:
    file.write_bytes(data)
    assert isinstance(safetensors.read_header(file).problem, str)


@tries(80)
@given(document=PLAIN, body=st.binary(max_size=64), claimed=st.none() | st.integers(0, 2**64 - 1))
def test_safetensors_headers(file: Path, document: object, body: bytes, claimed: int | None) -> None:
    raw = json.dumps(document).encode()
    file.write_bytes(struct.pack("<Q", len(raw) if claimed is None else claimed) + raw + body)
    header = safetensors.read_header(file)
    assert header.problem or all(isinstance(n, str) for n in header.names)


@tries(80)
@given(data=st.one_of(PLAIN.map(lambda v: json.dumps(v).encode()), st.binary(max_size=60)))
def test_weight_indexes(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    index = safetensors.read_index(file)
    assert index.problem or all("/" not in s and s not in ("", "..") for s in index.shards)


@tries(50)
@given(mapping=st.dictionaries(st.text(max_size=5), st.text(max_size=12), max_size=5))
def test_weight_indexes_name_no_path(file: Path, mapping: dict[str, str]) -> None:
    file.write_text(json.dumps({"weight_map": mapping}))
    index = safetensors.read_index(file)
    assert index.problem or index.shards <= set(mapping.values())


@tries(60)
@given(data=damaged(*TORCH) | st.binary(max_size=100).map(lambda b: b"PK\x03\x04" + b))
def test_torch_files(file: Path, bounded: None, data: bytes) -> None:
    file.write_bytes(data)
    assert isinstance(torch_zip.check(file), str)


@tries(60)
@given(
    name=st.sampled_from(["a.pt", "a.bin", "a.json", "a.safetensors", "a.ckpt", "a.pkl", "a"]),
    data=st.binary(max_size=80),
)
def test_any_file_by_its_name(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert isinstance(file_problem(tmp_path / name), str)


# -- pickles, in the child --------------------------------------------------------------------------------------------


@tries(20)
@given(data=damaged(DCP_INDEX))
def test_dcp_indexes_in_the_child(tmp_path: Path, data: bytes) -> None:
    """The child limits itself; whatever it is given, it answers, or ends and is replaced."""
    found = judged_index(tmp_path, data)
    assert found.whole or found.reason


def judged_index(place: Path, data: bytes) -> Inspection:
    (place / "step_5").mkdir(exist_ok=True)
    (place / "step_5" / "__0_0.distcp").write_bytes(bytes(6692))
    (place / "step_5" / ".metadata").write_bytes(data)
    found = judge(open_layout("dcp", place), 5)
    assert found is not None
    return found


@tries(15)
@given(data=damaged(*TORCH[:2]))
def test_values_in_the_child(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    values = values_in_torch_file(file)
    assert values is None or all(isinstance(v, bool | int | float | str) for v in values.values())


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'touch PLACE'\ntR.",
        b"cbuiltins\neval\n(S\"open('PLACE','w')\"\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch PLACE\x85R.",
        b"cbuiltins\ngetattr\n(cos\nsystem\nS'__call__'\ntR(S'touch PLACE'\ntR.",
        b"cpathlib\nPath\n(S'PLACE'\ntR(S'touch'\ntb.",
        pickle.dumps({"storage_data": {}}),
    ],
)
def test_nothing_a_pickle_names_is_run(tmp_path: Path, data: bytes) -> None:
    place = tmp_path / "ran"
    assert not judged_index(tmp_path, data.replace(b"PLACE", os.fsencode(place))).whole
    assert not place.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40),  # a text of a tebibyte
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 50) + b".",  # a frame
        b"\x80\x04K\x00r" + struct.pack("<I", 0xFFFFFFFF) + b".",  # a memo of four billion entries
        b"(" * 200_000,
        b"]" + b"(]" * 100_000 + b"e" * 100_000 + b".",
        b"\x80\x04" + b"\x8a\xff" + b"\x7f" * 255 + b".",
    ],
)
def test_giant_requests_end_in_a_refusal(tmp_path: Path, data: bytes) -> None:
    found = judged_index(tmp_path, data)
    assert not found.whole
    assert found.reason


@tries(80)
@given(value=PLAIN)
def test_the_stub_unpickler_reads_plain_values_as_they_are(value: object) -> None:
    assert repr(unpickler.load(pickle.dumps(value, 4))) == repr(value)


# -- trackers, markers, learned sets ----------------------------------------------------------------------------------


@tries(80)
@given(data=st.binary(max_size=40) | st.integers(-5, 10**20).map(lambda n: str(n).encode()) | st.just(b"9" * 5000))
def test_trackers(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "latest_checkpointed_iteration.txt"
    file.write_bytes(data)
    pinned = layout_of(all_trainers()["verl"], Site(file.parent)).pinned()
    assert all(data.strip() == str(step).encode() for step in pinned)


@tries(60)
@given(state=PLAIN, cut=st.integers(0, 60))
def test_markers_of_the_trainer(tmp_path: Path, state: object, cut: int) -> None:
    """trainer_state.json, progress files: anything JSON, or a piece of it."""
    place = tmp_path / "checkpoint-5"
    place.mkdir(exist_ok=True)
    (place / "trainer_state.json").write_bytes(json.dumps(state).encode()[:cut])
    layout = layout_of(all_trainers()["hf"], Site(tmp_path))
    verdict = judge(layout, 5)
    assert verdict is not None
    assert not verdict.whole
    assert verdict.reason
    layout.target_step(())
    layout.progress()


# -- whole trees ------------------------------------------------------------------------------------------------------

_WRITTEN_BY_SOMEBODY: str = """
    checkpoints step_5 step_10 step_5.bad step-5 step_latest global_step_5 global_step5 actor critic _actor _critic
    trainer orchestrator run_default broadcasts checkpoint-5 iter_0000005 checkpoint_0 5 5.orbax-checkpoint-tmp-1
    state d weights context tmp_step_5 old_step_5 training_state epoch=0-step=5.ckpt last.ckpt mp_rank_00 dist_ckpt
    policy release ckpt x--step=5-last x--step=5-last-unfinished checkpoint COMPLETED latest .metadata .metadata.tmp
    __0_0.distcp __1_0.distcp progress.pt STABLE model.safetensors model.safetensors.index.json optimizer.pt
    optimizer.bin scheduler.pt trainer_state.json data.pt rng_state_0.pth random_states_0.pkl
    latest_checkpointed_iteration.txt latest_ckpt_global_step.txt mp_rank_00_model_states.pt
    zero_pp_rank_0_mp_rank_00_optim_states.pt metadata.json common.pt _CHECKPOINT_METADATA commit_success.txt
    manifest.ocdbt _METADATA training_info.json meta.pt model_world_size_2_rank_0.pt fsdp_config.json
    ckpt_contents.json trainer_state.pt config.yaml
"""
NAMES = st.sampled_from([*_WRITTEN_BY_SOMEBODY.split(), "\udcff\udcfe", "new\nline"])
CONTENTS = st.sampled_from(
    [
        b"",
        b"5",
        b"global_step5",
        b"global_step_5\n",
        b"{}",
        b"[]",
        b"null",
        b'{"global_step": 5}',
        b'{"step": 5}',
        b"\xff\xfe",
        TORCH[3],
        SAFETENSORS[1],
        DCP_INDEX,
        b'{"weight_map": {"a": "model.safetensors"}}',
        TORCH[0][:500],
        b'{"world_size": "x"}',
        b'{"item_handlers": {"state": 1}, "commit_timestamp_nsecs": true}',
        b'{"global_step": 5, "directories": [1, "model"]}',
    ]
)
ENTRY = st.tuples(
    st.lists(NAMES, min_size=1, max_size=5), st.sampled_from(["file", "file", "file", "dir", "link", "pipe"]), CONTENTS
)


def plant(root: Path, entries: list[tuple[list[str], str, bytes]]) -> None:
    root.mkdir(exist_ok=True)
    for names, kind, data in entries:
        path = root.joinpath(*names)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                if not path.is_fifo():
                    path.write_bytes(data)
            elif kind == "dir":
                path.mkdir(exist_ok=True)
            elif kind == "pipe":
                os.mkfifo(path)
            else:
                path.symlink_to(names[0])
        except OSError:
            continue  # a file stands where a directory would have to, or a link leads in a circle


@tries(30)
@given(entries=st.lists(ENTRY, max_size=14), step=st.integers(0, 20))
def test_every_layout_over_random_trees(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[list[str], str, bytes]], step: int
) -> None:
    root = tmp_path_factory.mktemp("tree") / "out"
    plant(root, entries)
    site = Site(root)
    recognised(site)
    for name, kind in all_trainers().items():
        if name == "custom":
            continue
        with without_circles():
            judged_by(name, layout_of(kind, site), root, step)


@contextlib.contextmanager
def without_circles() -> Iterator[None]:
    """A link that leads in a circle is an OSError, which the catalogue reports."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise


def judged_by(name: str, layout: Layout, root: Path, step: int) -> None:
    for number, parts in layout.steps().items():
        assert parts
        verdict = layout.judge(number, [scan_part(p).found for p in parts])
        assert verdict.whole or verdict.reason, (name, number)
        assert all(root in (p, *p.parents) for p in layout.step_paths(number))
    ahead = layout.ahead_of(step)
    assert all(root in p.parents for p in ahead), (name, ahead)
    assert root not in layout.ahead_of(None)
    layout.trackers(step)
    layout.trackers(None)
    layout.pinned()
    layout.progress()
    layout.target_step(("python", "train.py"))
    layout.watch_roots()
    layout.wandb_identity()


@tries(80)
@given(
    command=st.lists(
        st.text(max_size=12) | st.sampled_from(["--config", "x.toml", "@", "-m", "verl.trainer", "--", "="]), max_size=8
    )
)
def test_recognition_over_random_commands(tmp_path: Path, command: list[str]) -> None:
    command = [c.replace("\0", "") for c in command]
    for found in recognised(Site(tmp_path, command=tuple(command))):
        assert found.why
