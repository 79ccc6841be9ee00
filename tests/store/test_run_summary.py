"""Runs as records: what a heartbeat says, whatever it contains, and how two stored configurations differ."""

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from podwatch.cli.runs_show_and_diff import run_document, summary_document
from podwatch.domain.account_document import AccountTotals, MoneyDocument
from podwatch.domain.lease import Beat, Heartbeat, read_beat
from podwatch.domain.safe_names import deceives
from podwatch.store.runs.difference import StartedWith, difference, pairs
from podwatch.store.runs.read import Activity, RunInStore, RunListing

BEAT = Heartbeat(
    outcome="finished",
    step=500,
    target=500,
    written_wall=10_600.0,
    step_wall=10_000.0,
    host="pod-1",
    account=AccountTotals(
        since=4_000.0,
        total_seconds=7260.0,
        goodput_ratio=0.98,
        failures=1,
        lost_seconds=60.0,
        steps_lost=3,
        money=MoneyDocument(so_far=8.47, lost=0.07, currency="EUR"),
    ),
)


def run_of(said: Heartbeat, *, began_wall: float | None = None, written_wall: float = 0.0) -> RunInStore:
    return RunInStore("r", Activity(written_wall, Beat(said)), listing=RunListing(oldest_wall=began_wall))


def test_the_run_ended_with_its_last_step_by_the_clock_of_the_store() -> None:
    found = run_of(BEAT, began_wall=5_000.0, written_wall=20_600.0)
    assert (found.started_wall, found.ended_wall, found.duration) == (4_000.0, 20_000.0, 16_000.0)
    assert (found.ended, found.step) == (True, 500)
    assert (summary_document(found)["cost"], summary_document(found)["currency"]) == (8.47, "EUR")
    stored = replace(BEAT, step=None, last_stored_step=480)
    assert run_of(stored).step == 480, "its last start made no step; one of a gave-up run was shown as -"
    assert not run_of(replace(BEAT, outcome="preempted")).ended


def test_figures_that_a_heartbeat_does_not_say_are_unknown() -> None:
    found = summary_document(run_of(Heartbeat(account=AccountTotals(total_seconds=60.0, failures=1))))
    assert (found["failures"], found["steps_lost"], found["lost_seconds"]) == (None, None, None)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(BEAT.to_json())), ANYTHING, max_size=2), ANYTHING)
def test_no_heartbeat_breaks_it(changes: dict[str, object], inner: object) -> None:
    for change in (changes, {"account": {"money": inner, "total_seconds": inner}}):
        beat = read_beat(json.dumps(BEAT.to_json() | {"step_wall": None} | change).encode())
        assert beat is not None
        found = run_document(run_of(beat.said), texts=False)
        assert not any(deceives(text or "") for text in (found["outcome"], found["host"], found["currency"]))


TEXTS = st.builds(
    StartedWith,
    st.lists(st.sampled_from(["uv", "run", "--lr", "1e-5", "3e-5"]), max_size=4).map(tuple),
    st.dictionaries(
        st.sampled_from(["/a/c.toml", "/b/c.toml", "/a/d.py", "/podwatch.toml"]),
        st.lists(st.sampled_from(["x = 1", "y = 2", "z = 3"]), max_size=5).map("\n".join),
        max_size=4,
    ),
)


@given(TEXTS, TEXTS)
def test_each_file_is_compared_once_and_equal_runs_do_not_differ(old: StartedWith, new: StartedWith) -> None:
    found = pairs(old, new)
    assert sorted(left for left, _ in found if left) == sorted(old.files)
    assert sorted(right for _, right in found if right) == sorted(new.files)
    assert difference("a", old, "b", old) == []
    texts = [old.files[left].splitlines() if left else [] for left, _ in found]
    others = [new.files[right].splitlines() if right else [] for _, right in found]
    assert (difference("a", old, "b", new) == []) == (texts == others and old.command == new.command)


def test_a_moved_file_is_found_by_its_name_and_no_secret_is_shown() -> None:
    old = StartedWith(
        ("rl", "@", "/root/one/c.toml"), {"/root/one/c.toml": "lr = 1\nwandb_api_key = 'aa11bb22cc33dd44ee55'"}
    )
    new = StartedWith(
        ("rl", "@", "/root/two/c.toml"), {"/root/two/c.toml": "lr = 2\nwandb_api_key = 'ff66bb22cc33dd44ee55'"}
    )
    lines = difference("a", old, "b", new)
    assert "--- a: /root/one/c.toml" in lines
    assert "-lr = 1" in lines
    assert "+lr = 2" in lines
    assert "aa11bb22cc33dd44ee55" not in json.dumps(lines)
