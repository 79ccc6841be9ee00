"""From bytes to steps: the forms prime-rl and Hugging Face print, and everything else."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podwatch.checkpoints.trainer import all_trainers
from podwatch.sensors.log_tail import (
    MAX_LINE,
    Carry,
    LogLine,
    StepLine,
    StepLines,
    clean,
    has_finish_line,
    role_of_file,
    split_lines,
)
from tests.support.examples import examples
from tests.support.known_trainers import LINES

COLOURED = b"\x1b[2m12:00:01\x1b[0m\x1b[1m SUCCESS\x1b[0m \x1b[22mStep 80 | Time: 183.22s | Loss: 0.1 | \x1b[0m"


@pytest.mark.parametrize(
    ("raw", "step", "role"),
    [
        (COLOURED, 80, "trainer"),
        (b"[default0]:" + COLOURED, 80, "trainer"),
        (b"[trainer0]:12:00:01 SUCCESS Step 7 |   3m 3s | x", 7, "trainer"),
        (b"12:00:01 SUCCESS Step 80 | Time: 9.1s | Reward: 0.4 | Async Level: 1 |", 80, "orchestrator"),
        (b"2026-01-07 12:00:01.123 | SUCCESS  Step 0 | x", 0, ""),
        (b"(Trainer pid=123) SUCCESS Step 5 | Loss 1", 5, "trainer"),
        (json.dumps({"level": "SUCCESS", "message": "Step 12 | Loss 0.3"}).encode(), 12, "trainer"),
        (json.dumps({"text": "x", "record": {"level": {"name": "SUCCESS"}, "message": "Step 3 | "}}).encode(), 3, ""),
        (b"{'loss': 0.5, 'grad_norm': 1.0, 'epoch': 0.02, 'step': 40}", 40, ""),
        (b'{"loss": 0.5, "global_step": 41, "epoch": 0.02}', 41, ""),
    ],
)
def test_step_lines(raw: bytes, step: int, role: str) -> None:
    assert LINES.parse(clean(raw)) == StepLine(step, role)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"12:00:01    INFO Step 80 | Loss 1",
        b"12:00:01 SUCCESS Saved checkpoint at step 80",
        b"12:00:01 SUCCESS Step eighty | x",
        b"12:00:01 DEBUG the model said: SUCCESS Step 99 | Loss 0",
        b"SUCCESS Step 9999999999999999999999 | x",
        b"{'loss': 0.5, 'grad_norm': 1.0, 'epoch': 0.02}",
        b"{'reward': 0.5, 'step': 3}",
        json.dumps({"level": "INFO", "message": "Step 12 | Loss 0.3"}).encode(),
        json.dumps({"level": "INFO", "message": "he wrote {'loss': 1, 'step': 5}"}).encode(),
        b'{"level": "SUCCESS", "message": 5}',
        b"[" * 5000,
        b'{"a":' * 5000,
        b"[1, 2]",
    ],
)
def test_lines_without_a_step(raw: bytes) -> None:
    assert LINES.parse(clean(raw)) is None


def test_the_prefix_beats_the_file_and_the_file_beats_the_columns() -> None:
    assert LINES.parse(LogLine("SUCCESS Step 1 | Reward 1", "trainer0"), "orchestrator") == StepLine(1, "trainer")
    assert LINES.parse(LogLine("SUCCESS Step 1 | Reward 1"), "trainer") == StepLine(1, "trainer")
    assert role_of_file("run_default/logs/orchestrator.log") == "orchestrator"
    assert role_of_file("logs/trainer/rank_0.log") == "trainer"
    assert role_of_file("logs/rl.log") == ""


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("12:00:00 SUCCESS RL trainer finished!", True),
        ("RL trainer finished!", True),
        ("12:00:00 SUCCESS RL trainer finished! [train.py::680]", True),
        ('{"level": "SUCCESS", "message": "RL trainer finished!"}', True),
        ("12:00:00 INFO waiting until it says RL trainer finished!", False),
        ("RL trainer finished! said the model", False),
        ("RL trainer finished", False),
    ],
)
def test_finish_lines(text: str, seen: bool) -> None:
    assert has_finish_line(clean(text.encode()), "RL trainer finished!") is seen


PIECES = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"\n", b"\r\n", b"\r", COLOURED, b"\x1b[", b"[trainer0]:", b'{"level": "SUCCESS"', b"\xff\xfe"]),
    st.integers(MAX_LINE - 2, MAX_LINE + 2).map(lambda n: b"x" * n),
)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(PIECES, max_size=12).map(b"".join), st.lists(st.integers(0, 20_000), max_size=8))
@example(b"x" * (MAX_LINE + 5) + b"\nnext\n", [MAX_LINE, MAX_LINE + 1])
def test_where_the_chunks_are_cut_makes_no_difference(data: bytes, cuts: list[int]) -> None:
    whole, expected = split_lines(Carry(), data)
    carry, lines = Carry(), []
    begin = 0
    for end in sorted(min(cut, len(data)) for cut in [*cuts, len(data)]):
        carry, more = split_lines(carry, data[begin:end])
        lines += more
        begin = end
    assert tuple(lines) == expected
    assert carry == whole
    assert all(len(line) <= MAX_LINE for line in lines)
    assert len(carry.begun) <= MAX_LINE


@settings(deadline=None, max_examples=examples(300))
@given(st.one_of(st.binary(max_size=300), st.text(max_size=200).map(str.encode), PIECES))
def test_arbitrary_bytes_never_raise(raw: bytes) -> None:
    line = clean(raw)
    assert "\x1b[2m" not in line.text
    LINES.parse(line)
    has_finish_line(line, "RL trainer finished!")


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(0, 10**9), st.text(alphabet="[]:()0123456789 \x1b|{}'\"abcSUCCESStep", max_size=40))
def test_a_real_line_is_found_whatever_stood_before_it(step: int, noise: str) -> None:
    real = f"12:00:01 SUCCESS Step {step} | Loss 0.1".encode()
    _, lines = split_lines(Carry(), noise.encode() + b"\n" + real + b"\n")
    found = LINES.parse(clean(lines[-1]))
    assert found is not None
    assert found.step == step


OWN_LINES = {
    "prime-rl": COLOURED,
    "hf": b"{'loss': 0.5, 'grad_norm': 1.0, 'epoch': 0.02, 'step': 80}",
    "verl": b"step:80 - global_seqlen/min:100 - actor/entropy:0.5 - timing_s/gen:3.2",
    "torchtitan": b"[titan] 2026-08-01 12:00:00,123 - root - INFO - step: 80  loss:  7.1  grad_norm:  1.0",
    "megatron": b" [2026-08-01 12:00:00] iteration       80/     100 | consumed samples:          160 | x",
    "deepspeed": b"[2026-08-01 12:00:00,1] [INFO] [logging.py:107:log_dist] [Rank 0] step=80, skipped=0, lr=[1e-05]",
}


@pytest.mark.parametrize("name", OWN_LINES)
def test_only_its_own_layout_knows_a_trainers_line(name: str) -> None:
    """So the order of the layouts does not matter, and each file can be read alone."""
    line = clean(OWN_LINES[name])
    knowing = {kind.name for kind in all_trainers().values() if StepLines((kind.log,)).parse(line) is not None}
    assert knowing == {name}
    found = StepLines(kind.log for kind in reversed(all_trainers().values())).parse(line)
    assert found is not None
    assert found == LINES.parse(line)
    assert found.step == 80
