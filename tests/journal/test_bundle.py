"""Bundles are whole, small, few and without secrets."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.process import ProcessIdentity, ProcessRole, ProcessSample
from podwatch.domain.secrets import register
from podwatch.domain.snapshot import GpuSample, Snapshot, observed
from podwatch.journal.bundle import capture
from podwatch.journal.explaining_line import decisive, highlights, since

KEY = "hf_" + "a1B2" * 8
FINDING = Finding(
    FindingKind.SILENT_DEATH,
    Severity.CRITICAL,
    "engine died",
    12.0,
    evidence=(Evidence("gpu0", "0.4 GiB", Agreement.AGREES, 8.0),),
)
SNAPSHOT = Snapshot(at=12.0, wall=100.0, gpus=observed((GpuSample(0, "GPU-1", "H100", memory_used_bytes=5),), 11.0))
TREE = (ProcessSample(ProcessIdentity(7, 70), 1, "rl", f"rl --token {KEY}", ProcessRole.LAUNCHER),)


def test_a_bundle_has_everything_and_no_secret(tmp_path: Path) -> None:
    register("s3cr3t-value")
    path = capture(
        tmp_path / "incidents" / "3",
        snapshots=[SNAPSHOT],
        finding=FINDING,
        tree=TREE,
        log_tails={"trainer.log": ["starting", f"login with {KEY}", "given s3cr3t-value"]},
        gpu_state={"0": "ok"},
        environment_names=["HF_TOKEN", "HOME"],
    )
    assert json.loads((path / "snapshot.json").read_text())[0]["gpus"]["value"][0]["memory_used_bytes"] == 5
    assert json.loads((path / "finding.json").read_text())["evidence"][0]["agreement"] == "agrees"
    assert (path / "environment.txt").read_text() == "HF_TOKEN\nHOME\n"
    assert "rl --token [removed]" in (path / "processes.txt").read_text()
    assert (path / "trainer.log").read_text().splitlines()[0] == "starting"
    everything = "".join(f.read_text() for f in path.iterdir())
    assert KEY not in everything
    assert "s3cr3t-value" not in everything
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in path.iterdir())
    assert capture(tmp_path / "incidents" / "3") == path


def test_size_and_number_are_bounded(tmp_path: Path) -> None:
    for number in range(1, 8):
        path = capture(
            tmp_path / str(number),
            finding=FINDING,
            log_tails={"../../evil.log": [f"{n} " + "x" * 900 for n in range(3000)]},
            max_bytes=50_000,
            keep=3,
        )
        assert sum(f.stat().st_size for f in path.iterdir()) <= 50_000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5", "6", "7"]
    assert next(path.glob("*evil.log")).read_text().splitlines()[-1].startswith("2999 ")


def test_a_bundle_cut_off_by_a_crash_is_written_again(tmp_path: Path) -> None:
    (tmp_path / ".4.partial").mkdir()
    (tmp_path / ".4.partial" / "snapshot.json").write_text("half")
    path = capture(tmp_path / "4", finding=FINDING)
    assert json.loads((path / "finding.json").read_text())["kind"] == "silent-death"
    assert not (tmp_path / ".4.partial").exists()


def test_logs_of_one_name_are_all_kept_and_a_short_one_leaves_its_room(tmp_path: Path) -> None:
    logs = {"logs/trainer.log": ["short"], "logs/attempt/trainer.log": ["x" * 99] * 400, "logs_trainer.log": ["third"]}
    path = capture(tmp_path / "1", log_tails=logs, max_bytes=41_000)
    kept = {p.name: p.read_text().splitlines() for p in path.glob("*.log")}
    assert sorted(map(len, kept.values()))[:2] == [1, 1]
    assert {"short", "third"} <= {lines[-1] for lines in kept.values()}
    assert len(kept["logs_attempt_trainer.log"]) > 300, "not a third of the room, but what the short ones leave"


def test_the_lines_that_matter_come_first() -> None:
    logs = {
        "trainer.log": ["Step 4 done", "Step 5 done"],
        "logs_inference.stdout": [
            "INFO ready",
            "Traceback (most recent call last):",
            "  File engine.py, line 3",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            *["ERROR the same again"] * 50,
            "INFO shutting down",
        ],
        "empty.log": ["", " "],
    }
    assert highlights(logs) == [
        ("logs_inference.stdout", "Traceback (most recent call last):"),
        ("logs_inference.stdout", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("logs_inference.stdout", "ERROR the same again"),
        ("trainer.log", "Step 5 done"),
    ]
    assert len(highlights({str(n): [f"x{n}"] for n in range(99)})) == 24


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB."


def test_a_line_that_two_logs_have_is_shown_once() -> None:
    last = "17:33:15 SUCCESS Step 45"
    assert highlights({"logs_trainer.log": [last], "trainer.log": [last]}) == [("logs_trainer.log", last)]
    error = "ERROR Process trainer failed"
    assert highlights({"train.log": ["x", error], "trainer.log": ["x", error]}) == [("train.log", error)]


def test_the_line_that_says_why_leads_over_those_that_report_the_end() -> None:
    logs = {
        "train.log": ["ERROR Process trainer failed with exit code 1"],
        "logs/trainer.log": ["SUCCESS Step 45", "Traceback (most recent call last):", "  loss.backward()", OOM],
        "logs/orchestrator.log": ["ConnectionError: the trainer has gone"],
    }
    assert decisive(logs) == ("logs/trainer.log", OOM)
    del logs["logs/trainer.log"]
    assert decisive(logs) == ("logs/orchestrator.log", "ConnectionError: the trainer has gone")
    assert decisive({"train.log": ["usage: rl", "rl: error: unrecognized arguments: --foo"]}) == (
        "train.log", "rl: error: unrecognized arguments: --foo"
    )  # fmt: skip
    assert decisive({"a.log": ["ERROR old"] + ["SUCCESS Step 1"] * 60, "b.log": ["SUCCESS Step 2"]}) is None


def test_the_error_of_the_start_before_is_not_this_one() -> None:
    first = ("Step 45", "Traceback (most recent call last):", OOM)
    assert since(first, (*first, "Step 41", "Step 42")) == ("Step 41", "Step 42")
    assert since(first, ("Step 41", "Step 42")) == ("Step 41", "Step 42"), "the trainer began a new log"
    assert since((), first) == first


@given(st.lists(st.sampled_from(["loading", "step 1", "ValueError: nan", ""]), max_size=9), st.integers(0, 12))
def test_what_a_crash_loop_repeats_is_new_each_time(crash: list[str], more: int) -> None:
    """Seen: from the third identical crash on, no finding named the error."""
    window = 2 * len(crash) + 2 + more
    log = [f"step {n}" for n in range(4)]
    before = tuple(log[-window:])
    for _ in range(4):
        log += [*crash, "the end"]
        now = tuple(log[-window:])
        found = since(before, now)
        assert now[len(now) - len(found) :] == found
        assert found[-1:] == ("the end",)
        assert len(found) <= len(crash) + 1, "nothing of the crash before"
        before = now
