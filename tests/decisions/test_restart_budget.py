"""Start again, step back, or give up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podwatch.config.settings import NodesSettings, Settings
from podwatch.domain.finding import FindingKind
from podwatch.domain.run_state import RunState
from podwatch.job.exit_code import Blame
from podwatch.recovery.restart_budget import (
    Action,
    Decision,
    Failure,
    RestartHistory,
    after_failure,
    blame_of,
    succeeded,
)
from podwatch.trainer.errors_in_output import deterministic, shows_failed_load
from tests.support.examples import examples


def with_recovery(**given: object) -> Settings:
    return Settings.model_validate({"run_id": "r", "trainer": {"output_dir": "/out"}, "recovery": given})


SETTINGS = with_recovery()
RECOVERY = SETTINGS.recovery
EXIT, DEATH, HANG = FindingKind.TRAINER_EXITED, FindingKind.SILENT_DEATH, FindingKind.HANG


def fail(
    history: RestartHistory,
    at: float,
    *,
    kind: FindingKind = EXIT,
    loaded: bool = False,
    made_step: bool = False,
    step: int | None = 40,
    lines: tuple[str, ...] = (),
    explained_by: str = "",
) -> Decision:
    failure = Failure(kind, at, loaded, made_step, step, lines, explained_by=explained_by)
    return after_failure(history, failure, SETTINGS, 0.5)


def test_a_command_that_never_worked_gets_two_tries() -> None:
    first = fail(RestartHistory(), 0.0)
    assert (first.action, first.delay_seconds) == (Action.START, 0.0)
    second = fail(first.history, 60.0)
    assert second.action is Action.GIVE_UP
    assert second.delay_seconds == 3600.0


def test_a_healthy_run_starts_again_at_once_and_backs_off_after_that() -> None:
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    delays = []
    for n in range(9):
        decision = fail(history, 1000.0 + n, kind=DEATH)
        delays.append(decision.delay_seconds)
        history = decision.history
    assert delays == [0.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]


def test_giving_up_needs_count_and_time() -> None:
    worked = succeeded(RestartHistory(), 0.0, RECOVERY)
    history = worked
    for n in range(30):  # many in a storm: never given up within two hours
        decision = fail(history, 100.0 + n * 200.0, kind=DEATH)
        assert decision.action is not Action.GIVE_UP
        history = decision.history
    assert fail(history, 100.0 + 7200.0, kind=DEATH).action is Action.GIVE_UP
    history = worked
    for n in range(4):  # few over a long time: never either
        decision = fail(history, 100.0 + n * 3000.0, kind=DEATH)
        assert decision.action is not Action.GIVE_UP
        history = decision.history
    assert fail(history, 12_100.0, kind=DEATH).action is Action.GIVE_UP


def test_one_death_an_hour_for_a_week_is_never_given_up() -> None:
    """SkyPilot #10155 and DLRover #1749: counters that were not reset after a recovery."""
    history, at = RestartHistory(), 0.0
    for _ in range(168):
        for step in range(19):
            history = succeeded(history, at + 300.0 + step * 180.0, RECOVERY)
        at += 3600.0
        decision = fail(history, at, kind=DEATH, loaded=True, made_step=True)
        assert decision.action is Action.START
        history = decision.history


def test_a_run_that_makes_one_step_and_hangs_is_given_up() -> None:
    history, at = RestartHistory(), 0.0
    actions = []
    for _ in range(8):
        history = succeeded(history, at + 300.0, RECOVERY)
        at += 300.0 + 31 * 60.0  # the hang detector needs longer than a calm period
        decision = fail(history, at, kind=HANG, loaded=True, made_step=True)
        actions.append(decision.action)
        history = decision.history
    assert Action.GIVE_UP in actions


def test_a_bad_checkpoint_is_left_after_two_proven_failures_only() -> None:
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    not_loaded = fail(history, 10.0)
    assert not not_loaded.step_back
    for n in range(4):  # start failures say nothing about the checkpoint
        not_loaded = fail(not_loaded.history, 20.0 + n)
        assert not not_loaded.step_back
    first = fail(history, 10.0, loaded=True)
    assert not first.step_back
    second = fail(first.history, 20.0, loaded=True)
    assert second.step_back
    assert second.action is not Action.GIVE_UP
    engine = fail(first.history, 20.0, kind=DEATH, loaded=True)
    assert not engine.step_back
    stepped = fail(first.history, 20.0, loaded=True, made_step=True)
    assert not stepped.step_back
    assert stepped.history.failed_loads == ()


def test_a_checkpoint_named_in_an_error_counts_as_loaded() -> None:
    lines = ("RuntimeError: cannot read /out/checkpoints/step_40/trainer/__0_0.distcp",)
    assert shows_failed_load(lines, 40)
    assert not shows_failed_load(lines, 4)
    assert not shows_failed_load(("Saving checkpoint step_40",), 40)
    first = fail(succeeded(RestartHistory(), 0.0, RECOVERY), 1.0, lines=lines)
    assert fail(first.history, 2.0, lines=lines).step_back


SERIALIZATION = 'File "/x/site-packages/torch/serialization.py", line 1634, in load'


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory.",
        f"""{SERIALIZATION}
    return _legacy_load(
_pickle.UnpicklingError: invalid load key, '\xa2'.""",
        f"""{SERIALIZATION}
    raise pickle.UnpicklingError(_get_wo_message(str(e))) from None
_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6, we changed the default value""",
        """  File "/x/torch/distributed/checkpoint/filesystem.py", line 899, in read_data
    torch.load(
    super().__init__(torch._C.PyTorchFileReader(name_or_buffer))
OSError: [Errno 22] Invalid argument""",
        """  File "/x/torch/_weights_only_unpickler.py", line 327, in load
    raise EOFError
EOFError
""".replace("_weights_only_unpickler", "serialization"),
        "AssertionError: metadata is None; global metadata read failed: invalid load key, '\xb6'.",
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large",
        "[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])",
    ],
)
def test_what_readers_of_weights_say_is_a_failed_load_although_it_names_no_file(text: str) -> None:
    """As torch 2.13 and safetensors print it for files of random bytes, cut files and empty ones."""
    lines = tuple(text.splitlines())
    first = fail(succeeded(RestartHistory(), 0.0, RECOVERY), 1.0, lines=lines)
    assert not first.step_back, "one failed load is no proof"
    assert fail(first.history, 2.0, lines=lines).step_back
    last = fail(succeeded(RestartHistory(), 0.0, RECOVERY), 1.0, lines=("exit code 1",), explained_by=lines[-1])
    assert fail(last.history, 2.0, lines=("exit code 1",), explained_by=lines[-1]).step_back == shows_failed_load(
        lines[-1:], 40
    )


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "_pickle.UnpicklingError: pickle data was truncated",  # by whom? a data loader reads pickles too
        "EOFError: Ran out of input",
        f"""{SERIALIZATION}
INFO loaded the checkpoint""",
        'File "/x/torch/serialization.py", line 12, in save\nOSError: No space left on device',
        f"{SERIALIZATION}\nOSError: [Errno 5] Input/output error",
        "CheckpointException: rank 0: [Errno 116] Stale file handle: '/nfs/step_40/__0_0.distcp'",
        "ValueError: the learning rate is negative",
    ],
)
def test_other_errors_say_nothing_about_the_checkpoint(text: str) -> None:
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    for n in range(4):
        decision = fail(history, 1.0 + n, lines=tuple(text.splitlines()))
        history = decision.history
        assert not decision.step_back


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.AcceleratorError: CUDA error: unspecified launch failure",
        "NVRM: Xid (PCI:0000:17:00): 79, GPU has fallen off the bus.",
        "CUDA error: uncorrectable ECC error encountered",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251",
        "[E821 12:00:00.1 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    ],
)
def test_a_machine_fault_never_blames_the_checkpoint(line: str) -> None:
    """Seen: 180 -> 175 -> 170 for an NCCL error, called "did not load", and the store's pointer followed."""
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    for n in range(6):
        decision = fail(history, 10.0 * n, loaded=True, lines=("loaded checkpoints/step_40", line, "exit 1"))
        assert not decision.step_back
        history = decision.history
    assert history.failed_loads == ()


def test_a_programs_own_assertion_on_the_gpu_is_no_machine_fault() -> None:
    lines = ("RuntimeError: CUDA error: device-side assert triggered",)
    first = fail(succeeded(RestartHistory(), 0.0, RECOVERY), 1.0, loaded=True, lines=lines)
    assert fail(first.history, 2.0, loaded=True, lines=lines).step_back


def test_the_reason_for_a_step_back_says_what_was_seen() -> None:
    first = fail(succeeded(RestartHistory(), 0.0, RECOVERY), 1.0, loaded=True)
    assert "and failed again before a new step" in fail(first.history, 2.0, loaded=True).reason


def test_stepping_back_stops_when_every_checkpoint_fails_alike() -> None:
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    backs = 0
    for n in range(12):
        decision = fail(history, 10.0 * n, loaded=True, step=100 - 5 * backs)
        backs += decision.step_back
        history = decision.history
    assert backs == 2


def test_a_wrong_resume_asks_and_is_not_tried_again_after_an_hour() -> None:
    """Never a step back: the trainer ignored its argument, and no checkpoint is at fault."""
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    decision = fail(history, 5.0, kind=FindingKind.RESUMED_WRONG, loaded=True, made_step=True)
    assert (decision.action, decision.delay_seconds, decision.step_back) == (Action.GIVE_UP, 0.0, False)


def test_a_new_pod_with_a_damaged_newest_set_goes_back_once() -> None:
    first = fail(RestartHistory(), 0.0, loaded=True)
    second = fail(first.history, 10.0, loaded=True)
    assert second.step_back
    assert second.action is not Action.GIVE_UP
    third = fail(second.history, 20.0, loaded=True, step=35)
    assert third.action is not Action.GIVE_UP
    fourth = fail(third.history, 30.0, loaded=True, step=35)
    assert (fourth.action, fourth.step_back) == (Action.GIVE_UP, False)


def test_deterministic_lines_need_a_person_unless_a_step_was_made() -> None:
    lines = ("starting", "rl: error: unrecognized arguments: --ckpt.resume-stepp 40", "")
    history = succeeded(RestartHistory(), 0.0, RECOVERY)
    decision = fail(history, 1.0, lines=lines)
    assert decision.action is Action.GIVE_UP
    assert "unknown argument" in decision.reason
    assert fail(history, 1.0, lines=lines, made_step=True).action is Action.START
    assert fail(history, 1.0, lines=lines, kind=DEATH).action is Action.START


def test_what_the_table_knows() -> None:
    for line in (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for RLConfig",
        "  Extra inputs are not permitted [type=extra_forbidden, input_value=3]",
        "Error: No such option: --ckpt",
        "wandb.errors.UsageError: api_key not configured (no-tty). call wandb login [your_api_key]",
        "ValueError: max_tokens=65536 is too large for this model's context",
    ):
        assert deterministic((line,)), line
    for line in (
        "torch.OutOfMemoryError: CUDA out of memory",
        "ConnectionError: store",
        "Step 80 | Time: 3s",
        "Killed",
    ):
        assert not deterministic((line,)), line


def test_after_giving_up_there_is_one_try_an_hour_and_a_calm_period_forgives() -> None:
    given_up = fail(fail(RestartHistory(), 0.0).history, 1.0).history
    again = fail(given_up, 3700.0)
    assert (again.action, again.delay_seconds) == (Action.GIVE_UP, 3600.0)
    history = given_up
    for n in range(12):
        history = succeeded(history, 4000.0 + n * 180.0, RECOVERY)
    assert not history.gave_up
    assert fail(history, 9000.0, kind=DEATH).action is Action.START


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([EXIT, DEATH, HANG]),
            st.floats(0, 4000),
            st.booleans(),
            st.booleans(),
            st.none() | st.integers(0, 50),
        ),
        max_size=40,
    ),
    st.floats(0, 1),
)
def test_whatever_happens(events: list[tuple[FindingKind, float, bool, bool, int | None]], jitter: float) -> None:
    history, at, first = succeeded(RestartHistory(), 0.0, RECOVERY), 0.0, None
    for count, (kind, gap, loaded, made_step, step) in enumerate(events, 1):
        at += gap
        first = at if first is None else first
        decision = after_failure(history, Failure(kind, at, loaded, made_step, step), SETTINGS, jitter)
        if decision.action is Action.GIVE_UP:
            assert count >= RECOVERY.budget_restarts
            assert at - first >= RECOVERY.budget_time
            return
        assert 0 <= decision.delay_seconds <= RECOVERY.backoff_max
        assert not decision.step_back or step is not None
        history = RunState.from_bytes(RunState("r", history=decision.history).to_bytes()).history
        assert history == decision.history


LEAVING = with_recovery(on_give_up="exit")


def leaves(line: str, streak: int, *, broken: bool = False) -> bool:
    """Whether a run that has worked is given up at the failure with this number in its streak."""
    history, decision = succeeded(RestartHistory(), 0.0, LEAVING.recovery), None
    for n in range(streak):
        failure = Failure(DEATH, 1000.0 + n, True, True, 40, (line,), machine_broken=broken and n == streak - 1)
        decision = after_failure(history, failure, LEAVING, 0.5)
        assert n == streak - 1 or decision.action is not Action.GIVE_UP, "not before"
        history = decision.history
    assert decision is not None
    return decision.action is Action.GIVE_UP


@pytest.mark.parametrize(
    ("line", "at"),
    [
        ("CUDA error: uncorrectable ECC error encountered", 1),
        ("NVML: Unknown Error", 1),
        ("CUDA error: an illegal memory access was encountered", 3),
        ("torch.distributed.DistBackendError: NCCL error", 3),
    ],
)
def test_an_engine_gets_the_job_back_from_a_broken_machine(line: str, at: int) -> None:
    assert leaves(line, at)


def test_a_gpu_that_a_sensor_sees_broken_is_enough() -> None:
    assert not leaves("Killed", 1)
    failure = Failure(DEATH, 5.0, True, True, 40, ("Killed",), machine_fault="GPU 0 is lost", machine_broken=True)
    assert after_failure(RestartHistory(ever_worked=True), failure, LEAVING, 0.5).action is Action.GIVE_UP


def test_a_fault_in_the_trainers_own_log_counts_like_one_in_the_launchers_output() -> None:
    """prime-rl's launcher writes the trainer's output to logs/trainer.log, and itself only prints that it ended."""
    said = Failure(DEATH, 5.0, True, False, 40, ("failed: {'trainer': 1}",))
    assert after_failure(RestartHistory(ever_worked=True), said, LEAVING, 0.5).action is not Action.GIVE_UP
    explained = replace(said, explained_by="RuntimeError: CUDA error: uncorrectable ECC error encountered")
    decision = after_failure(RestartHistory(ever_worked=True), explained, LEAVING, 0.5)
    assert decision.action is Action.GIVE_UP
    assert not decision.step_back
    assert blame_of(explained, True) is Blame.MACHINE


def test_without_an_engine_a_machine_fault_is_retried_here() -> None:
    failure = Failure(DEATH, 5.0, True, True, 40, ("uncorrectable ECC error",))
    assert after_failure(RestartHistory(ever_worked=True), failure, SETTINGS, 0.5).action is Action.START


def test_one_of_several_nodes_restarts_nothing_alone() -> None:
    """Not even the first failure of a run that worked: the engine starts all nodes again."""
    alone = SETTINGS.model_copy(update={"nodes": NodesSettings(rank=1, count=2)})
    failure = Failure(FindingKind.TRAINER_EXITED, 100.0, True, True, 40)
    decision = after_failure(RestartHistory(ever_worked=True), failure, alone, 0.5)
    assert decision.action is Action.GIVE_UP
    assert "the engine starts them together" in decision.reason
    assert after_failure(RestartHistory(ever_worked=True), failure, SETTINGS, 0.5).action is Action.START
