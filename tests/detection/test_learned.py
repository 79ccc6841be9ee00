"""What is learned, for how long it holds, and that it comes back from where it is kept."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.detection.learned import KEPT, Learned
from podwatch.detection.rules import initial
from podwatch.domain.facts import Facts
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Snapshot
from podwatch.journal import Journal
from podwatch.report.daemon_view import DaemonView
from podwatch.report.status import build_status
from tests.detection.looks import GIB, world

ABOUT = ("run-a prime-rl", "[0] [1]")
FULL = Learned(
    gpu_baseline_bytes=((0, 60 * GIB),),
    step_seconds=(3.0, 5.0),
    gap_seconds=(3.0, 5.0),
    save_seconds=(40.0,),
    startups=(300.0, 900.0),
    utilization_works=True,
    start_id="s1",
    seen=("gpu0", "health"),
    clean_exit_start_id="s0",
    clean_exit_step=40,
    about=ABOUT,
)

seconds = st.lists(st.floats(0, 1e6), max_size=5).map(tuple)
some = st.builds(
    Learned,
    gpu_baseline_bytes=st.dictionaries(st.integers(0, 7), st.integers(0, 1 << 40)).map(
        lambda d: tuple(sorted(d.items()))
    ),
    step_seconds=seconds,
    gap_seconds=seconds,
    save_seconds=seconds,
    startups=seconds,
    utilization_works=st.booleans(),
    start_id=st.text(max_size=5),
    seen=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    clean_exit_start_id=st.text(max_size=5),
    clean_exit_step=st.none() | st.integers(0, 99),
    about=st.tuples(st.text(max_size=5), st.text(max_size=5)),
)


@given(some)
def test_it_survives_being_kept(learned: Learned) -> None:
    assert Learned.from_json(json.loads(json.dumps(learned.to_json()))) == learned


@given(
    st.dictionaries(
        st.sampled_from(sorted(FULL.to_json())), st.none() | st.text() | st.integers() | st.lists(st.text())
    )
)
def test_nonsense_is_forgotten_as_a_whole(data: dict[str, object]) -> None:
    found = Learned.kept(data)
    assert found is None or found.to_json() | data == found.to_json()


def test_the_journal_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "podwatch.db"
    for write in (True, False):
        journal = Journal.open(path)
        if write:
            journal.learn("learned", FULL.to_json())
        assert Learned.from_json(journal.learned("learned")) == FULL
        journal.close()


@pytest.mark.parametrize(
    ("run", "gpus", "kept"),
    [
        ("run-a prime-rl", "[0] [1]", FULL),
        ("run-b prime-rl", "[0] [1]", Learned(about=("run-b prime-rl", "[0] [1]"))),
        ("run-a hf", "[0] [1]", Learned(about=("run-a hf", "[0] [1]"))),
        (
            "run-a prime-rl",
            "[0, 1] [2]",
            Learned(clean_exit_start_id="s0", clean_exit_step=40, about=("run-a prime-rl", "[0, 1] [2]")),
        ),
    ],
)
def test_another_run_or_other_gpus_forget_it(run: str, gpus: str, kept: Learned) -> None:
    assert FULL.for_run(run, gpus) == kept


def test_only_configured_gpus_keep_their_figures() -> None:
    policies = world(gpu__inference=(1,)).policies
    learned = initial(policies, FULL).learned
    assert learned.gpu_baseline_bytes == ()


def test_no_list_grows_without_end() -> None:
    learned = Learned()
    for n in range(200):
        learned = learned.add(**dict.fromkeys(KEPT, float(n)))
    assert {name: len(getattr(learned, name)) for name in KEPT} == KEPT
    assert learned.startups[-1] == 199


def test_the_status_shows_each_figure_with_its_observations() -> None:
    shown = build_status(DaemonView("0.1", "r", Facts(Snapshot(9.0, 9.0), RunState("r")), 9.0, 9.0, learned=FULL))[
        "learned"
    ]
    assert shown["step_seconds"] == {"value": 4.0, "observations": 2}
    assert shown["startup_seconds"] == {"value": 600.0, "observations": 2}
    assert shown["save_seconds"] == {"value": 40.0, "observations": 1}
    interval = {"value": FULL.median_save_gap_seconds, "observations": len(FULL.save_gaps)}
    assert shown["save_interval_seconds"] == interval
    assert shown["gpus"] == [{"index": 0, "baseline_bytes": 60 * GIB}]


def test_it_is_learned_as_the_run_goes_on() -> None:
    found = world()
    found.quiet(120)
    learned = found.state.learned
    assert learned.baseline(0) == 60 * GIB
    assert learned.median_step_seconds == 20.0
