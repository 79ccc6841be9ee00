"""Which tests are the slow ones: `make test-slow` runs them (and the gate does), `make test` leaves them out."""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from podwatch.domain import secrets
from tests.support.examples import examples

# The same cases each time: a gate must not be green today and red tomorrow. HYPOTHESIS_PROFILE=full tries all of them
# (`make test-slow`); random (or long, with `make fuzz`) looks for new ones.
# No deadline: that would be one of the wall clock, on a machine that does other things as well.
settings.register_profile(
    "steady", max_examples=examples(), derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
if os.environ.get("HYPOTHESIS_PROFILE", "full") == "full":
    settings.load_profile("steady")

SLOW = (
    "tests/checkpoints/layouts/test_write_order.py",
    "tests/checkpoints/layouts/test_write_order_more.py",
    "tests/checkpoints/test_bombs.py",
    "tests/checkpoints/test_fuzz.py",
    "tests/checkpoints/test_hostile.py",
    "tests/checkpoints/test_prefixes.py",
    "tests/checkpoints/test_truncation.py",
    "tests/checkpoints/test_trust.py",
    "tests/cli/test_added_by_a_package.py",
    "tests/cli/test_bootstrap.py",
    "tests/cli/test_clean.py",
    "tests/cli/test_quarantine.py",
    "tests/cli/test_restore.py",
    "tests/cli/test_runs.py",
    "tests/cli/test_runs_check.py",
    "tests/cli/test_runs_killed.py",
    "tests/cli/test_store.py",
    "tests/controller/test_controller.py",
    "tests/daemon/test_init.py",
    "tests/e2e/test_added_store.py",
    "tests/e2e/test_artefacts.py",
    "tests/e2e/test_bad_input.py",
    "tests/e2e/test_beside.py",
    "tests/e2e/test_by_hand.py",
    "tests/e2e/test_checkpoints.py",
    "tests/e2e/test_command_adopted.py",
    "tests/e2e/test_disk_at_proportions.py",
    "tests/e2e/test_families.py",
    "tests/e2e/test_footing.py",
    "tests/e2e/test_foreign.py",
    "tests/e2e/test_full_disk.py",
    "tests/e2e/test_heartbeats.py",
    "tests/e2e/test_implausible_steps.py",
    "tests/e2e/test_interrupts.py",
    "tests/e2e/test_life_judged.py",
    "tests/e2e/test_more_families.py",
    "tests/e2e/test_notified.py",
    "tests/e2e/test_pause_and_observe.py",
    "tests/e2e/test_pod_gone.py",
    "tests/e2e/test_poisoned_directory.py",
    "tests/e2e/test_preempt.py",
    "tests/e2e/test_refused_store.py",
    "tests/e2e/test_replaced.py",
    "tests/e2e/test_rollback_by_hand.py",
    "tests/e2e/test_secrets.py",
    "tests/e2e/test_seen_to_end.py",
    "tests/e2e/test_service_manager.py",
    "tests/e2e/test_sick_driver.py",
    "tests/e2e/test_start_before_stop_also.py",
    "tests/e2e/test_trainers.py",
    "tests/e2e/test_two_pods.py",
    "tests/e2e/test_two_writers.py",
    "tests/e2e/test_wandb_identity.py",
    "tests/e2e/test_what_the_status_says.py",
    "tests/e2e/test_while_the_others_ran.py",
    "tests/recording/test_recording.py",
    "tests/hooks/test_evaluation.py",
    "tests/journal/test_standby_crash.py",
    "tests/detection/test_healthy_nights.py",
    "tests/detection/test_ends_in_every_order.py",
    "tests/detection/test_nights.py",
    "tests/policy/test_disk_forecast.py",
    "tests/detection/test_engine_properties.py",
    "tests/paths/test_every_moment.py",
    "tests/packaging/test_distributions.py",
    "tests/recovery/test_crash.py",
    "tests/recovery/test_crash_rounds.py",
    "tests/recovery/test_real_trees.py",
    "tests/retention/test_saving_process.py",
    "tests/retention/test_small_disk.py",
    "tests/sensors/test_silent_death.py",
    "tests/simulation/test_demo.py",
    "tests/simulation/test_simulated_rl.py",
    "tests/sync/test_archive.py",
    "tests/sync/test_artifacts.py",
    "tests/sync/test_b2_tables.py",
    "tests/sync/test_crash.py",
    "tests/sync/test_crash_rounds.py",
    "tests/sync/test_restore_workers.py",
    "tests/sync/test_fetch.py",
    "tests/sync/test_held_uploads.py",
    "tests/sync/test_hostile_bucket.py",
    "tests/sync/test_import_backups.py",
    "tests/sync/test_interrupted_uploads.py",
    "tests/sync/test_optional_parts.py",
    "tests/sync/test_restore_crash.py",
    "tests/sync/test_restore_volumes.py",
    "tests/sync/test_send_parts.py",
    "tests/sync/test_sent_ahead.py",
    "tests/sync/test_sweeping.py",
    "tests/sync/test_two_pods.py",
    "tests/sync/test_two_pods_schedules.py",
    "tests/sync/test_apply_cpu_priority.py",
    "tests/trainer/test_crash.py",
    "tests/trainer/test_hung_reads.py",
    "tests/trainer/test_keeper_program.py",
    "tests/trainer/test_survivors.py",
    "tests/trainer/test_terminals.py",
)
"""Files that mostly wait for real processes, or try very many cases: together as long as all the others."""

LONGEST = (
    "tests/sync/test_crash.py",
    "tests/recovery/test_crash_rounds.py",
    "tests/packaging/test_distributions.py",
    "tests/e2e/test_footing.py",
    "tests/e2e/test_job.py",
    "tests/sync/test_two_pods_schedules.py",
    "tests/sync/test_restore_crash.py",
    "tests/cli/test_poisoned_directory.py",
    "tests/e2e/test_job_verdicts.py",
    "tests/sync/test_crash_rounds.py",
    "tests/journal/test_standby_crash.py",
    "tests/paths/test_every_moment.py",
    # of the default suite: 10 to 20 s each
    "tests/cli/test_status.py",
    "tests/daemon/test_init_job.py",
    "tests/daemon/test_node_disks.py",
    "tests/e2e/test_life.py",
    "tests/stores/test_conformance.py",
    "tests/stores/test_s3.py",
    "tests/sync/test_restore.py",
    "tests/sync/test_syncer.py",
    "tests/trainer/test_keeper.py",
)
"""They start first, so that the end does not wait for one of them: with ``--no-loadscope-reorder``, for pytest-xdist
begins with the files of many tests, and ends with these."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run at most N cases of each test, spread evenly over all of them: for the gate (make nightly runs all)"
    parser.addoption("--cases", type=int, metavar="N", help=text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the slow tests, their files are not even imported, unless one is named on the command line."""
    left_out = config.option.markexpr == "not slow" and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return True if left_out and str(collection_path.relative_to(config.rootpath)) in SLOW else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Each worker imports the test files beginning with its own share: in a new checkout none compiles them all (10 s),
    but finds most of them compiled by another one. What cannot be imported is reported by the collection."""
    config, worker = session.config, os.environ.get("PYTEST_XDIST_WORKER", "")
    usual = config.option.markexpr == "not slow" and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if worker and usual:
        found = [file for file in sorted(Path(__file__).parent.rglob("test_*.py")) if "suites" not in file.parts]
        files = [file for file in found if not pytest_ignore_collect(file, config)]
        first = len(files) * int(worker.removeprefix("gw")) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        for file in files[first:] + files[:first]:
            with contextlib.suppress(Exception, pytest.skip.Exception, pytest.fail.Exception):
                importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))
    return (yield)


COLLECTIONS = gc.get_threshold()
gc.set_threshold(200_000, 20, 20)  # until all is collected: thousands of objects, of which each lives until the end


def pytest_collection_finish() -> None:
    """What was collected stays, so no later collection has to look at it."""
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    yield  # -m and -k leave out: the cases are chosen among the others
    most = config.getoption("--cases")
    if most:
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {cases[n * len(cases) // most] for cases in tests.values() for n in range(most)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # stable


def pytest_report_header(config: pytest.Config) -> str:
    return "the slow tests are left out (make test-slow)" if config.option.markexpr == "not slow" else ""


@pytest.fixture(autouse=True)
def no_known_secrets() -> None:
    """What one test made known to the scrubber is ordinary text in the next one."""
    secrets.forget()


@pytest.fixture(autouse=True)
def ordinary_priority() -> Iterator[None]:
    """A test that lowers the priority of its own thread (as a slow deletion does) leaves it to no other test: processes
    inherit it, and without the right to raise it they keep it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
