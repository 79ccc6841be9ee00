"""Nights of the simulated pods: nothing healthy is restarted, every fault is found within its bound.

The light version of benchmarks/false_restarts.py and benchmarks/detection_latency.py.
"""

import dataclasses

import pytest

from tests.drivers.detection import FindingKind, acts
from tests.support.pods.deaths import FAULTS, Fault
from tests.support.pods.healthy import Run
from tests.support.pods.shapes import SHAPES, Shape
from tests.support.pods.watching import catch, healthy_night, judged

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[s.name for s in SHAPES])
def test_no_healthy_pod_is_touched(number: int) -> None:
    # Three times as much trouble as usual, in a short time.
    shape = dataclasses.replace(SHAPES[number], trouble=3.0 * SHAPES[number].trouble)
    night = healthy_night(number, 0.75, shape)
    assert not night.false
    assert night.turns > 500


@pytest.mark.parametrize("number", range(len(SHAPES)), ids=[s.name for s in SHAPES])
def test_runs_that_are_ended_and_engines_that_are_replaced_all_the_time(number: int) -> None:
    """A sample of `make hours`."""
    often = dataclasses.replace(SHAPES[number], person=2.0, reload=3.0, load=(20.0, 60.0), compile=(5.0, 20.0))
    night = healthy_night(100 + number, 3.0, often)
    assert not night.false
    assert night.ended + night.replaced > 2


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[6], SHAPES[9]], ids=lambda shape: shape.name)
def test_a_weight_update_that_runs_into_its_timeout_is_no_hang_and_no_death(shape: Shape) -> None:
    """Slow steps, then 12 to 14 minutes without a token or an answer of ``/liveness``, NVML glitches meanwhile: what
    earlier rules restarted."""
    worst = dataclasses.replace(
        shape, step_seconds=150.0, long_update=0.4, slow_step=0.4, evaluation=0.0, person=0.0, trouble=8.0,
        load=(30.0, 60.0), compile=(5.0, 30.0),
    )  # fmt: skip
    assert not healthy_night(3, 3.0, worst).false


@pytest.mark.parametrize("fault", FAULTS, ids=[f.name for f in FAULTS])
def test_every_fault_is_found_within_its_bound(fault: Fault) -> None:
    quick = dataclasses.replace(fault, after=min(fault.after, 1500.0))
    caught, _ = catch(quick, seed=7)
    assert caught.good, caught


def test_a_pod_that_nothing_befalls_arms_its_detectors() -> None:
    """Else none of the above could fail."""
    shape = dataclasses.replace(SHAPES[0], person=0.0, load=(30.0, 40.0), compile=(5.0, 6.0))
    seen = [finding for _, findings in judged(Run(shape, 1), 0.3, shape.policies()) for finding in findings]
    assert not [f for f in seen if acts(f)]
    assert FindingKind.SENSOR_BLIND not in {f.kind for f in seen}
