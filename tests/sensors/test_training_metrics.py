"""The training's figures, as each trainer writes them."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.trainer import all_trainers
from podwatch.domain.snapshot import TrainingMetrics
from podwatch.sensors.log_tail import FileNews, Sources, clean
from podwatch.sensors.progress import PingInbox, ProgressSensor
from podwatch.sensors.training_metrics import (
    FIGURES_GLOBS,
    STEPS_KEPT,
    MetricReader,
    TrainingSensor,
    merge,
)
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until
from tests.support.clock import ManualClock
from tests.support.known_trainers import step_reader

READER = MetricReader(kind.log for kind in all_trainers().values())
LINES = [
    (  # prime-rl, January 2026: trainer
        "\x1b[32m12:00:00\x1b[0m \x1b[1mSUCCESS\x1b[0m Step 80 | Time: 183.22s | Loss: 0.1234 | Entropy: 0.4321 |"
        " Mismatch KL: 0.0012 | Grad. Norm: 1.2345 | LR: 1.00e-06 | Throughput: 900 tokens/s | MFU: 12.1%",
        (80, {"loss": 0.1234, "entropy": 0.4321, "kl": 0.0012, "grad_norm": 1.2345}),
    ),
    (  # its orchestrator
        "12:00:00 SUCCESS Step 81 | Time: 183.22s | Reward: 0.4000 | Val. Reward: 0.9 | Throughput: 900 tokens/s",
        (81, {"reward": 0.4}),
    ),
    (  # v0.6 and later
        "[trainer0]: 12:00:00 SUCCESS Step 82 |  3m 3s | Loss nan | Entropy 0.04 | Mismatch KL 0.6 | Grad. Norm inf |",
        (82, {"loss": math.nan, "entropy": 0.04, "kl": 0.6, "grad_norm": math.inf}),
    ),
    ("12:00:00 SUCCESS Step 83 |   3m 3s | Reward 0.5000 | Trainable 64/64 (100.0%) |", (83, {"reward": 0.5})),
    (json.dumps({"level": "SUCCESS", "message": "Step 84 | 3m | Loss 0.5 | LR 1e-6"}), (84, {"loss": 0.5})),
    (  # verl's console
        "(TaskRunner pid=77) step:10 - global_seqlen/min:1 - actor/entropy:0.3 - actor/grad_norm:np.float64(0.2)"
        " - actor/ppo_kl:1e-05 - critic/rewards/mean:0.25",
        (10, {"entropy": 0.3, "grad_norm": 0.2, "kl": 1e-05, "reward": 0.25}),
    ),
    (  # TRL
        "{'loss': 0.0123, 'grad_norm': 0.7, 'learning_rate': 1e-06, 'reward': 0.4, 'kl': 0.001, 'entropy': 0.2,"
        " 'epoch': 0.1}",
        (None, {"loss": 0.0123, "grad_norm": 0.7, "reward": 0.4, "kl": 0.001, "entropy": 0.2}),
    ),
]


def same(left: dict[str, float], right: dict[str, float]) -> bool:
    return left.keys() == right.keys() and all(
        left[k] == right[k] or (math.isnan(left[k]) and math.isnan(right[k])) for k in left
    )


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_step_lines(line: str, expected: tuple[int | None, dict[str, float]]) -> None:
    found = READER.from_line(clean(line.encode()))
    assert found is not None
    assert found[0] == expected[0]
    assert same(found[1], expected[1])


@pytest.mark.parametrize(
    "line",
    [
        "12:00:00 INFO rollout: SUCCESS Step 3 | Loss 9.0",
        "12:00:00 SUCCESS Step 3 | Time: 3s | LR: 1e-6",
        "{'accuracy': 0.5}",
        "the answer is {'loss': 99.0}",
        "",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert READER.from_line(clean(line.encode())) is None


def test_rows_of_prime_rl() -> None:
    rows = [
        {"step": 5, "time": 1.0, "perf/mfu": 12.0},
        {"step": 5, "time": 1.0, "optim/lr": 1e-6, "optim/grad_norm": 6.5},
        {"step": 5, "time": 1.0, "entropy/all/mean": 0.3, "mismatch_kl/all/mean": 0.01, "loss/mean": -0.1},
        {
            "step": 5,
            "train/agg/effective/solver/reward/mean": 0.4,
            "train/agg/effective/judge/reward/mean": 0.6,
            "train/math/effective/solver/reward/mean": 0.9,
            "eval/math/effective/solver/reward/mean": 0.1,
        },
    ]
    found = [row for raw in rows if (row := READER.from_row(clean(json.dumps(raw).encode()))) is not None]
    assert found == [
        (5, {"grad_norm": 6.5}),
        (5, {"entropy": 0.3, "kl": 0.01, "loss": -0.1}),
        (5, {"reward": 0.5}),
    ]
    kept: dict[int, dict[str, float]] = {}
    merge(kept, [(s, v) for s, v in found if s is not None], 8)
    assert kept == {5: {"grad_norm": 6.5, "entropy": 0.3, "kl": 0.01, "loss": -0.1, "reward": 0.5}}


def test_rows_of_others() -> None:
    assert READER.from_row(clean(b'{"step": 3, "data": {"actor/entropy": 0.2}}')) == (
        3,
        {"entropy": 0.2},
    )  # verl's file logger
    assert READER.from_row(clean(b'{"global_step": 3, "kl": NaN}')) is not None
    assert [
        READER.from_row(clean(raw))
        for raw in (b"{}", b"[1]", b'{"step": 3}', b'{"step": true, "kl": 1}', b"\xff", b"1")
    ] == [None] * 6


def test_each_of_our_names_has_every_name_once() -> None:
    everything = [name for kind in all_trainers().values() for names in kind.log.metrics.values() for name in names]
    assert len(everything) == len(set(everything))
    assert READER.named({"mismatch_kl/all/mean": 0.2, "kl": 9.0}) == {"kl": 0.2}


@given(st.binary(max_size=200))
def test_anything_is_read(raw: bytes) -> None:
    READER.from_line(clean(raw))
    READER.from_row(clean(raw))


def newest(sensor: TrainingSensor) -> TrainingMetrics | None:
    value = sensor.latest().value
    return value[-1] if value else None


async def test_the_file_of_the_present_start(tmp_path: Path) -> None:
    path = tmp_path / "my-run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 99, "optim/grad_norm": 99.0}\n')
    clock = SystemClock()
    sensor = TrainingSensor(clock, READER)
    progress = ProgressSensor(
        clock, tuple, logs=Sources(tmp_path), inbox=PingInbox(clock), steps=step_reader, poll=0.02,
        readers=(sensor,), figures=Sources(tmp_path, FIGURES_GLOBS),
    )  # fmt: skip
    await progress.start()
    await until(lambda: progress.latest().ok)
    progress.begin_start(clock.wall())
    await until(lambda: progress.latest().ok)
    assert newest(sensor) is None
    with path.open("a") as file:
        for step in range(1, 20):
            file.write(json.dumps({"step": step, "optim/grad_norm": float(step)}) + "\n")
    await until(lambda: newest(sensor))
    value = sensor.latest().value or ()
    assert [m.step for m in value] == list(range(20 - STEPS_KEPT, 20))
    assert value[-1].values == (("grad_norm", 19.0),)
    assert value[-1].source == "metrics.jsonl"
    assert progress.last_lines() == (), "it is no log"
    await progress.stop()


def test_step_lines_serve_where_there_is_nothing_better() -> None:
    clock = ManualClock()
    sensor = TrainingSensor(clock, READER)
    lines = tuple(clean(line.encode()) for line, _ in LINES[:2])
    sensor.take(sensor.look([FileNews("x", lines=lines)]), clock.monotonic())
    assert [m.step for m in sensor.latest().value or ()] == [80, 81]
    # Hugging Face trainers print no step: each line is the next one.
    sensor.reset()
    sensor.take(sensor.look([FileNews("x", lines=(clean(LINES[-1][0].encode()),) * 3)]), clock.monotonic())
    assert [m.step for m in sensor.latest().value or ()] == [1, 2, 3]
    row = clean(b'{"step": 5, "kl": 0.1}')
    sensor.take(sensor.look([FileNews("metrics.jsonl", lines=(row,), figures=True)]), 1.0)
    assert [(m.step, m.source) for m in sensor.latest().value or ()] == [(5, "metrics.jsonl")]
