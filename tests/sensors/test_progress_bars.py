"""Steps from progress bars and from the step lines of trainers other than prime-rl.

The files in captured/ were written by transformers 5.x, accelerate and lightning 2.6 on torch 2.13 (CPU), standard
output and standard error in one file as the supervisor's log has them.
"""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.sensors.log_tail import Carry, clean, split_lines
from tests.support.known_trainers import LINES, step_reader

CAPTURED = Path(__file__).parent / "captured"


def steps(name: str, **options: object) -> list[int]:
    _, lines = split_lines(Carry(), (CAPTURED / f"{name}.log").read_bytes() + b"\n")
    reader = step_reader(**options)  # type: ignore[arg-type]
    return [found.step for raw in lines if (found := reader.read(clean(raw))) is not None]


@pytest.mark.parametrize("target", [None, 30])
def test_hugging_face(target: int | None) -> None:
    """The bar of the training, not those of the evaluations (5 batches) and of the shards that are written."""
    found = steps("hf", target=target)
    assert found == sorted(found)
    assert found[-1] == 30
    assert (1 in found) is (target == 30)  # without a target it is known from the first training log on
    assert len(set(found)) > 8


def test_hugging_face_without_bars_has_no_steps() -> None:
    assert steps("hf-no-bar") == []


def test_accelerate_style_bar() -> None:
    """One bar for the run, and an evaluation's bar after each epoch."""
    found = steps("accelerate")
    assert found == sorted(found)
    assert set(found) == set(range(1, 61))


def test_lightning_bars() -> None:
    """Three epochs of 20 batches each; sanity check and validation have bars too."""
    found = steps("lightning-tqdm")
    assert found == sorted(found)
    assert set(found) >= {5, 20, 25, 60}
    assert steps("lightning-rich")[-1:] == [60]
    endless = "Epoch 2/-2 ━━━━━━━━ 8/8 0:00:00 • 0:00:00 321.94it/s v_num: 0.000"  # max_steps alone: no last epoch
    found = step_reader().read(clean(endless.encode()))
    assert found is not None
    assert found.step == 24


@pytest.mark.parametrize(
    ("raw", "step"),
    [
        (b"step:12 - global_seqlen/min:100 - actor/entropy:0.5 - timing_s/gen:3.2", 12),
        (b"\x1b[36m(TaskRunner pid=123)\x1b[0m step:12 - training/global_step:12 - actor/lr:1e-06", 12),
        (b"(TaskRunner pid=123, ip=10.0.0.2) step:7 - train/loss:0.5 - train/lr(1e-3):0.01", 7),
        (b"[rank0]:[titan] 2026-08-01 12:00:00,123 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1234  x", 10),
        (b"[titan] 2026-08-01 12:00:00,123 - root - INFO - step: 1000  loss:  7.1  grad_norm:  1.0", 1000),
        (b" [2026-08-01 12:00:00] iteration       10/     100 | consumed samples:          160 | x", 10),
        (b"[2026-08-01 12:00:00,1] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=0, lr=[1e-05]", 10),
    ],
)
def test_step_reader_other_trainers(raw: bytes, step: int) -> None:
    found = LINES.parse(clean(raw))
    assert found is not None
    assert found.step == step


@pytest.mark.parametrize(
    "raw",
    [
        b"step:0 - val-core/gsm8k/reward/mean@1:0.1",
        b"step:12 - val/loss:0.4",
        b"step:0 - actor/entropy:0.5",
        b"the model said step:12 - actor/entropy:0.5",
        b"[titan] 2026-08-01 12:00:00,123 - root - INFO - validate step: 10  loss:  7.1234",
        b" validation loss at iteration 10 | lm loss value: 7.1E+00",
        b"[INFO] [logging.py:107:log_dist] [Rank 0] rank=0 time (ms) | step: 10",
        b"Evaluating:  40%|####      | 8/20 [00:01<00:02,  5.00it/s]",
        b"Validation DataLoader 0:  40%|####      | 8/20 [00:01<00:02,  5.00it/s, v_num=1]",
        b"Steps:   0%|          | 0/60 [00:00<?, ?it/s]",
        b"Steps:  40%|####      | 40/100 [00:00<?, ?it/s]",  # a resume from 40 that has made no step
        b"Epoch 1:  40%|####      | 8/20 [00:01<00:02,  5.00it/s]",  # of a script: epochs may count from 1
        b"  40%|####      | 8/20 [00:01<00:02,  5.00it/s]",
        b"\n  40%|####      | 60/100 [00:01<00:02,  5.00it/s]\x1b[A",
    ],
)
def test_what_is_no_training_step(raw: bytes) -> None:
    assert step_reader(target=100).read(clean(raw)) is None


LOG = b"{'loss': 0.5, 'learning_rate': 1e-05, 'epoch': 0.02}"


@given(st.lists(st.tuples(st.sampled_from([7, 100, 1000]), st.integers(0, 1000), st.booleans()), max_size=30))
def test_an_unnamed_bar_counts_only_after_a_training_log(states: list[tuple[int, int, bool]]) -> None:
    """Whatever bars come: a step is read only from the bar that was the newest, unfinished, at a training log."""
    reader, newest, trusted = step_reader(), None, None
    for total, count, log in states:
        done = min(count, total)
        rate = b"5.00it/s" if done else b"?it/s"
        found = reader.read(clean(b"%3d%%|##  | %d/%d [00:01<00:02, %s]" % (done * 100 // total, done, total, rate)))
        newest = (done, total)
        assert (found.step if found else None) == (done if done and total == trusted else None)
        if log:
            found = reader.read(clean(LOG))
            moved = 0 < newest[0] < newest[1]
            assert (found.step if found else None) == (newest[0] if moved else None)
            trusted = newest[1] if moved else trusted


@given(st.text(alphabet="Epoch 0123456789%|/[<:,?it\u2501\u2022 s=v_num.]{}'loss", max_size=120))
def test_arbitrary_lines_never_raise(text: str) -> None:
    reader = step_reader(target=5)
    for line in (text, LOG.decode(), text):
        reader.read(clean(line.encode()))


def test_a_pattern_of_the_operator() -> None:
    reader = step_reader(custom=re.compile(r"^iter (\d+) done"))
    assert [
        s.step if (s := reader.read(clean(t))) else None
        for t in (b"iter 12 done", b"iter x done", b"step:1 - actor/x:1")
    ] == [12, None, None]
    assert step_reader(custom=re.compile("x")).read(clean(b"x")) is None
    assert step_reader(custom=re.compile(r"(\d+)")).read(clean(b"9" * 30)) is None
