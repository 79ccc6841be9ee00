"""The tests' options, and what holds for each of them.

Two markers: ``slow`` (`make test` leaves these out, the gate runs them) and ``root`` (needs uid 0, skipped otherwise).
Where tests run that start podwatch or look at processes: tests/support/isolation.py.
"""

import contextlib
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from podwatch.domain import secrets
from tests.support.examples import examples
from tests.support.isolation import Isolation

# The same cases each time: a gate must not be green today and red tomorrow. HYPOTHESIS_PROFILE=full tries all of them
# (`make test-slow`); random (or long, with `make fuzz`) looks for new ones.
# No deadline: that would be one of the wall clock, on a machine that does other things as well.
settings.register_profile(
    "steady", max_examples=examples(), derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
if os.environ.get("HYPOTHESIS_PROFILE", "full") == "full":
    settings.load_profile("steady")

WHOLE_FILE_IS_SLOW = re.compile(r"^pytestmark = \[?pytest\.mark\.slow\b", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run at most N cases of each test, spread evenly over all of them: for the gate (make nightly runs all)"
    parser.addoption("--cases", type=int, metavar="N", help=text)
    parser.addoption("--parallel", type=int, default=0, metavar="N", help="run the tests of N files at a time")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Isolation(config), "isolation")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests are not even imported for `make test`, unless one is named on the command line."""
    usual = config.option.markexpr == "not slow" and config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if not usual or collection_path.suffix != ".py":
        return None
    return True if WHOLE_FILE_IS_SLOW.search(collection_path.read_text()) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
    yield  # -m and -k leave out: the cases are chosen among the others
    most = config.getoption("--cases")
    if most:
        tests: dict[str, list[pytest.Item]] = {}
        for item in items:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
        kept = {cases[n * len(cases) // most] for cases in tests.values() for n in range(most)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    """Thousands of objects that live until the end: a collection in a forked child would copy the pages of each."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    return "the slow tests are left out (make test-slow)" if config.option.markexpr == "not slow" else ""


@pytest.fixture(autouse=True)
def no_known_secrets() -> None:
    """What one test made known to the scrubber is ordinary text in the next one."""
    secrets.forget()


@pytest.fixture(autouse=True)
def one_inspection_child() -> Iterator[None]:
    """For a whole test, as for a whole rescan: one for each question would be most of the suite's time."""
    inspector = sys.modules.get("podwatch.checkpoints.inspector")
    with contextlib.nullcontext() if inspector is None else inspector.INSPECTOR:
        yield


@pytest.fixture(scope="module")
def reader_of_the_file() -> Iterator[None]:
    """One child inspects for all tests of a file: starting one takes longer than most of them."""
    from tests.drivers.checkpoints import reader_that_lives

    with reader_that_lives():
        yield


@pytest.fixture(autouse=True)
def ordinary_priority() -> Iterator[None]:
    """A test that lowers the priority of its own thread (as a slow deletion does) leaves it to no other test: processes
    inherit it, and without the right to raise it they keep it."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != before:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
