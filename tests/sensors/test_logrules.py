"""Log rules: what they match, what they do not, what they cost, through real log files."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.checkpoints.trainer import all_trainers
from podwatch.detection.log_rules import effective, shipped
from podwatch.domain.snapshot import LogMatch, SensorState
from podwatch.domain.trainer_log import LogRule
from podwatch.sensors import match_log_rules
from podwatch.sensors.log_tail import FileNews, Sources, clean
from podwatch.sensors.match_log_rules import LogRulesSensor, prepare, scan
from podwatch.sensors.progress import PingInbox, ProgressSensor
from podwatch.system.clock import SystemClock
from tests.sensors.waiting import until
from tests.support.clock import ManualClock
from tests.support.known_trainers import step_reader

TRAINERS = tuple(kind.log for kind in all_trainers().values())
SHIPPED = shipped(TRAINERS)
PATTERNS = prepare(SHIPPED)

# Lines as the programs write them; sources: facts/prime-rl.md sections 4 and 5, vLLM 0.12.0, PyTorch 2.9.
TROUBLE = {
    "cuda-error": [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "[trainer0]: torch.AcceleratorError: CUDA error: device-side assert triggered",
        "(EngineCore_DP0 pid=77) ERROR 08-21 12:00:00 [core.py:845] RuntimeError: CUDA error: unspecified failure",
        "RuntimeError: CUDA driver error: device not ready",
    ],
    "cuda-out-of-memory": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79 GiB",
        "[rank0]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
    "nccl": [
        "[rank0]:[E821 03:00:01.123456 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout:"
        " WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000)",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268",
        "RuntimeError: NCCL communicator was aborted on rank 1.",
    ],
    "engine-dead": [
        "(EngineCore_DP0 pid=77) ERROR 08-21 12:00:00 [core.py:845] EngineCore encountered a fatal error.",
        "(APIServer pid=7) ERROR 08-21 12:00:00 [async_llm.py:525] AsyncLLM output_handler failed.",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
        "ERROR 08-21 12:00:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down",
    ],
    "interrupted": [
        "KeyboardInterrupt",
        "[trainer0]: KeyboardInterrupt: ",
        "W0821 12:00:00.000000 139 torch/distributed/elastic/agent/server/api.py:719] Received Signals.SIGINT death"
        " signal, shutting down workers",
        "W0821 12:00:00.000000 139 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal,"
        " shutting down workers",
        "12:00:00  WARNING Received signal 15, terminating all processes [rl.py::88]",
        "12:00:00     INFO Received SIGINT, shutting down",
    ],
    "too-many-open-files": [
        "OSError: [Errno 24] Too many open files: '/tmp/x'",
        "zmq.error.ZMQError: Too many open files",
        "12:00:00    ERROR Rollout failed: OSError(24, 'Too many open files')",
    ],
    "files-limit-low": [
        "WARNING 08-21 12:00:00 [utils.py:250] Found ulimit of 32000 and failed to automatically increase with error"
        " current limit exceeds maximum limit. This can cause fd limit errors",
    ],
    "killed": [
        "/bin/bash: line 1: 12345 Killed                  uv run rl @ config.toml",
        "E0821 12:00:00.000000 139 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: -9)"
        " local_rank: 0 Signal 9 (SIGKILL) received by PID 77",
    ],
    "out-of-memory": [
        "OSError: [Errno 12] Cannot allocate memory",
        "MemoryError: bad allocation",
    ],
    "bus-error": [
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Bus error. It is possible that dataloader's"
        " workers are out of shared memory.",
    ],
    "crashed": ["Fatal Python error: Segmentation fault", "!!!!!!! Segfault encountered !!!!!!!"],
    "disk-full": [
        "OSError: [Errno 28] No space left on device: '/app/outputs/checkpoints/step_20/trainer/__0_0.distcp'",
        "RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos: [Errno 28]",
        "tee: trainer.log: No space left on device",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
}
TROUBLE["run-directory-used"] = [
    "FileExistsError: Run directory '/app/outputs/run' already contains artifacts from a previous run. To resume the"
    " latest step of the previous run, pass --resume (or --resume.step N).",
]
STORMS = {
    "api-connection-errors": [
        "12:00:00  WARNING Rollout failed: APIConnectionError('Connection error.') [scheduler.py::281]",
        "openai.APIConnectionError: Connection error.",
        "12:00:00    ERROR Group failed with openai.APIConnectionError: Connection error.",
    ],
    "context-too-long": [
        "12:00:00  WARNING Rollout failed: BadRequestError(\"Error code: 400 - {'message': \\\"This model's maximum"
        ' context length is 4096 tokens"',
    ],
}
HEALTHY = [
    "12:00:00  SUCCESS Step 80 | Time: 183.22s | Loss: 0.1234 | Entropy: 0.4321 | Mismatch KL: 0.0012",
    "12:00:00     INFO Rollout: 'To fix RuntimeError: CUDA error: an illegal memory access, set CUDA_LAUNCH_BLOCKING'",
    "12:00:00    DEBUG completion: I got torch.OutOfMemoryError: CUDA out of memory. Help! Too many open files",
    "The process died: EngineDeadError, No space left on device, NCCL error, Killed",
    "a bus error? No: Bus error. and APIConnectionError",
    "INFO 08-21 12:00:00 [api_server.py:1300] Started EngineCore, 0 EngineDeadError so far",
    "│ assistant │ RuntimeError: CUDA error: an illegal memory access was encountered │",
    '{"level": "INFO", "message": "quoted: OSError: [Errno 24] Too many open files", "line": 3}',
    "12:00:00     INFO NCCL version 2.27.5+cuda12.9",
    "12:00:00     INFO Rollout: 'the handler prints: Received SIGTERM, shutting down'",
    "12:00:00    DEBUG completion: KeyboardInterrupt is raised by Ctrl-C",
    # what torchrun does with the other ranks when one has failed by itself
    "W0821 12:00:00.000000 139 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 77 closing signal"
    " SIGTERM",
]


def names(*lines: str) -> list[str]:
    found = scan([FileNews("x.log", "x.log", lines=tuple(clean(line.encode()) for line in lines))], PATTERNS)
    return [hit.rule for hit in found.hits for _ in range(hit.count)]


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, lines in TROUBLE.items() for line in lines])
def test_trouble_is_known(rule: str, line: str) -> None:
    assert rule in names(line)
    assert next(r for r in SHIPPED if r.name == rule).count == 1


@pytest.mark.parametrize(("rule", "line"), [(rule, line) for rule, lines in STORMS.items() for line in lines])
def test_what_happens_now_and_then_needs_a_count(rule: str, line: str) -> None:
    assert names(line) == [rule]
    assert next(r for r in SHIPPED if r.name == rule).count >= 20


@pytest.mark.parametrize("line", HEALTHY)
def test_words_that_are_only_quoted_do_not_count(line: str) -> None:
    assert names(line) == []


def test_every_shipped_rule_is_tried_here() -> None:
    assert {rule.name for rule in SHIPPED} == TROUBLE.keys() | STORMS.keys()


def test_colours_and_json_are_seen_through() -> None:
    assert names("\x1b[32m12:00:00\x1b[0m \x1b[31m\x1b[1m   ERROR\x1b[0m \x1b[31mCUDA error: unknown\x1b[0m") == [
        "cuda-error"
    ]
    entry = {
        "level": "ERROR",
        "message": "the trainer failed",
        "exception": 'Traceback:\n  File "x"\ntorch.OutOfMemoryError: CUDA out of memory. Tried',
    }
    assert names(json.dumps(entry)) == ["cuda-out-of-memory"]
    assert names(json.dumps({"record": {"level": {"name": "ERROR"}, "message": "CUDA error: x"}})) == ["cuda-error"]
    assert names(json.dumps({**entry, "message": ""})) == ["cuda-out-of-memory"]


def test_every_shipped_pattern_is_quick_on_the_worst_of_lines() -> None:
    """Lines made to make it try: beginnings that it accepts, and its own words again and again."""
    for name, pattern in PATTERNS.items():
        words = re.findall(r"[A-Za-z][\w .]{3,}", pattern.pattern)
        for piece in {*words, "a: ", "A.b: ", "1:", " ", "x", "x ", "12:00:00 ERROR ", "[E821 ", "[", "(", "/", "-"}:
            for head in ("", "12:00:00 ERROR ", "A.b: A.b: ", "1" * 40, "[E821 12:00:00] ", "E0821 x] ", "tee: x: "):
                line = (head + piece * 1000)[:1000]
                began = time.thread_time()
                pattern.search(line)
                assert time.thread_time() - began < 0.01, (name, piece, head)


def test_a_line_is_cut_before_it_is_matched() -> None:
    plain, quoted = "x" * 995 + "EngineDeadError", json.dumps({"level": "INFO", "message": "y" * 995 + "EngineDead"})
    patterns = prepare([LogRule("end", "EngineDead")])
    assert scan([FileNews("x", lines=(clean(plain.encode()), clean(quoted.encode())))], patterns).hits == ()


@given(st.binary(max_size=300))
def test_any_line_is_read(raw: bytes) -> None:
    scan([FileNews("x", lines=(clean(raw),))], PATTERNS)


def test_a_flood_is_cut_off_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_log_rules, "LOOK_SECONDS", 0.01)
    lines = (clean(b"y" * 900),) * 200_000  # many times what any machine reads in that time
    found = scan([FileNews("x", lines=lines)], prepare([LogRule("any", "x")]))
    assert found.skipped > 100_000


# -- over time


def feed(sensor: LogRulesSensor, clock: ManualClock, path: str, *lines: str) -> None:
    news = [FileNews(path, path, lines=tuple(clean(line.encode()) for line in lines))]
    sensor.take(sensor.look(news), clock.monotonic())


def only(sensor: LogRulesSensor) -> LogMatch:
    (match,) = sensor.latest().value or ()
    return match


STORM = LogRule("storm", r"^ERROR lost", count=20, within=600.0)


def test_hits_are_counted_within_the_window() -> None:
    clock = ManualClock()
    sensor = LogRulesSensor(clock, [STORM])
    assert sensor.latest().state is SensorState.PENDING
    feed(sensor, clock, "a.log", *["ERROR lost"] * 15)
    first = clock.monotonic()
    clock.advance(300.0)
    feed(sensor, clock, "a.log", *["ERROR lost it"] * 7, "fine")
    match = only(sensor)
    assert (match.count, match.line) == (22, "ERROR lost it")
    assert (match.first_at, match.last_at) == (first, first + 300.0)
    clock.advance(310.0)
    feed(sensor, clock, "a.log")
    assert only(sensor).count == 7
    clock.advance(600.0)
    feed(sensor, clock, "a.log")
    assert only(sensor).count == 0  # it was seen in this start, but not lately
    sensor.reset()
    assert sensor.latest().value == ()


def test_a_line_in_two_logs_counts_once_and_for_who_wrote_it() -> None:
    clock = ManualClock()
    sensor = LogRulesSensor(clock, [STORM])
    feed(sensor, clock, "supervisor.log", *["ERROR lost"] * 5)
    feed(sensor, clock, "logs/orchestrator.log", *["ERROR lost"] * 5)
    assert (only(sensor).count, only(sensor).role) == (5, "orchestrator")


def test_memory_does_not_grow_with_a_storm() -> None:
    clock = ManualClock()
    sensor = LogRulesSensor(clock, [STORM])
    for _ in range(700):
        feed(sensor, clock, "a.log", *["ERROR lost"] * 10)
        clock.advance(2.0)
    (hits,) = sensor._seen["storm"].files.values()
    assert 2900 <= only(sensor).count <= 3100
    assert len(hits) <= 62


def test_secrets_are_not_shown() -> None:
    clock = ManualClock()
    sensor = LogRulesSensor(clock, [STORM])
    feed(sensor, clock, "a.log", "ERROR lost HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz012345")
    assert "hf_" not in only(sensor).line


def test_other_rules_count_from_the_next_poll_on() -> None:
    clock = ManualClock()
    sensor = LogRulesSensor(clock, [LogRule("old", "lost")])
    feed(sensor, clock, "a.log", "ERROR lost")
    assert only(sensor).rule == "old"
    sensor.configure([STORM])
    assert sensor.latest().value == ()
    feed(sensor, clock, "a.log", "ERROR lost")
    assert only(sensor).rule == "storm"


def test_silence_of_the_disk_is_blindness_and_no_log_is_no_sensor() -> None:
    clock = ManualClock()
    sensor = LogRulesSensor(clock, [STORM])
    feed(sensor, clock, "a.log")
    clock.advance(61.0)
    assert sensor.latest().state is SensorState.BLIND
    assert LogRulesSensor(clock, [STORM], followed=False).latest().state is SensorState.ABSENT


def test_the_owners_rules_come_with_ours_and_replace_them_by_name() -> None:
    own = (LogRule("mine", "x"), LogRule("cuda-error", "y"))
    rules = effective(own, TRAINERS)
    assert {rule.name: rule.pattern for rule in rules if rule in own} == {"mine": "x", "cuda-error": "y"}
    assert len(rules) == len(SHIPPED) + 1


# -- through the sensor that follows the logs


@asynccontextmanager
async def following(tmp_path: Path) -> AsyncIterator[tuple[ProgressSensor, LogRulesSensor]]:
    clock = SystemClock()
    rules = LogRulesSensor(clock, SHIPPED)
    progress = ProgressSensor(
        clock,
        tuple,
        logs=Sources(tmp_path, ("logs/*.log",)),
        inbox=PingInbox(clock),
        steps=step_reader,
        poll=0.02,
        readers=(rules,),
    )  # fmt: skip
    await progress.start()
    try:
        await until(lambda: rules.latest().ok)
        yield progress, rules
    finally:
        await progress.stop()


async def test_from_a_real_file_and_from_the_present_start_only(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "inference.log"
    log.parent.mkdir()
    line = "(EngineCore_DP0 pid=7) ERROR 08-21 12:00:00 [core.py:845] EngineCore encountered a fatal error.\n"
    log.write_text(line)  # an earlier start's
    async with following(tmp_path) as (progress, rules):
        await asyncio.sleep(0.1)
        assert rules.latest().value == ()
        with log.open("a") as file:
            file.write(line)
        await until(lambda: rules.latest().value)
        assert (only(rules).rule, only(rules).role, only(rules).count) == ("engine-dead", "inference", 1)
        log.write_text("a new beginning\n" + line * 2)  # truncated and written anew
        await until(lambda: only(rules).count == 3)
        progress.begin_start(time.time())
        assert rules.latest().value == ()


def test_lines_of_a_read_that_began_before_the_start_do_not_count(tmp_path: Path) -> None:
    clock = SystemClock()
    rules = LogRulesSensor(clock, SHIPPED)
    progress = ProgressSensor(
        clock, tuple, logs=Sources(tmp_path, ("*.log",)), inbox=PingInbox(clock), steps=step_reader, readers=(rules,)
    )
    (tmp_path / "a.log").write_text("KeyboardInterrupt\n")
    progress.absorb(progress.prepare()())
    for meanwhile, counted in ((False, 1), (True, 0)):
        with (tmp_path / "a.log").open("a") as file:
            file.write("KeyboardInterrupt\n")
        look = progress.prepare()()
        if meanwhile:
            progress.begin_start(time.time())
        progress.absorb(look)
        assert sum(match.count for match in rules.latest().value or ()) == counted


async def test_a_reader_that_fails_does_not_blind_the_steps(tmp_path: Path) -> None:
    class Broken(LogRulesSensor):
        def look(self, news: object) -> object:  # type: ignore[override]
            raise RuntimeError("a fault of ours")

    clock = SystemClock()
    progress = ProgressSensor(
        clock, tuple, logs=Sources(tmp_path, ("*.log",)), inbox=PingInbox(clock), steps=step_reader, poll=0.02,
        readers=(Broken(clock, SHIPPED),),
    )  # fmt: skip
    await progress.start()
    await until(lambda: progress.latest().ok)
    assert "a fault of ours" in progress.latest().detail
    await progress.stop()
