"""``podwatch replay``: the same night gives the same answer, whatever lies in the file."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from podwatch.cli.root import cli
from podwatch.detection.rules import advance, initial
from podwatch.domain.errors import HostError, UsageError
from podwatch.domain.snapshot import Snapshot
from podwatch.recording.format import Header, SegmentWriter, write_recording
from tests.drivers.detection import judging
from tests.support.pods.deaths import engine_dies
from tests.support.pods.healthy import Run
from tests.support.pods.shapes import SHAPES
from tests.support.pods.world import BEGIN, Piece

POLICIES = judging(gpu__inference=(0,), gpu__trainer=(1,))
WALL = 1_700_000_000.0
QUIET = replace(
    SHAPES[0], load=(30.0, 40.0), compile=(5.0, 6.0), tool_bound=0.0, dip=0.0, evaluation=0.0, long_update=0.0,
    person=0.0,
)  # fmt: skip


def night(dies_at: float | None = 1500.0, hours: float = 0.5) -> list[Snapshot]:
    run = Run(QUIET, 7)
    if dies_at is not None:
        run.world.add(death(run), "death", dies_at)
    return [replace(t, wall=WALL + t.at, boot_at=t.at) for t in run.world.snapshots(hours)]


def death(run: Run) -> Piece:
    run.world.drop("life")
    yield from engine_dies(run)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recording")
    turns = night()
    header = Header("run-1", "prime-rl", "s1", turns[0].wall, 2.0, POLICIES)
    write_recording(directory / "00000001-x.jsonl.gz", header, turns[:300])
    write_recording(directory / "00000002-x.jsonl.gz", header, turns[300:])
    return directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["replay", *map(str, arguments)])


def document(*arguments: object) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.output)
    return found


def died(found: dict[str, object]) -> list[float]:
    from podwatch.domain.times import from_rfc3339

    times = [from_rfc3339(t) for t in found["would_restart_at"]]  # type: ignore[attr-defined]
    return [t - WALL - BEGIN for t in times if t is not None]


def test_a_silent_death_of_last_night(recording: Path) -> None:
    found = document(recording)
    (at,) = died(found)
    assert 1500.0 < at <= 1515.0
    assert found["run_ids"] == ["run-1"]
    assert found["sessions"] == 1
    assert found["gaps"] == []
    assert found["problems"] == []
    assert found["turns"] == len(night())
    assert found["recorded_seconds"] == pytest.approx(1798.0, abs=6.0)
    (act,) = [f for f in found["findings"] if f["acts"]]  # type: ignore[attr-defined]
    assert (act["kind"], act["subject"], act["verdict"], act["confirmed"]) == ("silent-death", "gpu0", "restart", True)
    assert {e["agreement"] for e in act["evidence"]} >= {"agrees"}

    text = run(recording).output
    assert "WOULD RESTART: silent-death gpu0" in text
    assert re.search(r"gpu0 memory: 0\.00 GiB, was (?:59|60)\.\d\d GiB \(agrees, \d+ s\)", text), text
    assert "would have restarted 1 time: " in text
    assert "run run-1" in text
    assert "thresholds as recorded" in text


def test_a_healthy_night(tmp_path: Path) -> None:
    write_recording(tmp_path / "a.jsonl.gz", Header("r", policies=POLICIES), night(None, 0.3))
    assert "would have restarted 0 times" in run(tmp_path / "a.jsonl.gz").output


def test_since_and_until_limit_what_is_told_not_what_is_known(recording: Path) -> None:
    assert len(died(document(recording, "--since", "2023-11-14T22:37:30Z"))) == 1  # armed long before
    before = document(recording, "--until", "2023-11-14T22:37:30Z")
    assert died(before) == []
    assert before["turns"] < 900  # type: ignore[operator]
    assert "nothing was recorded in that time" in run(recording, "--since", "1h").output


def test_the_thresholds_of_a_configuration(tmp_path: Path) -> None:
    """Of an engine whose process stays: one that is seen to end needs no ``hold``."""
    turns = night()
    before = [t for t in turns if t.at - BEGIN < 1500.0]
    kept = [replace(t, trainer=replace(before[-1].trainer, at=t.trainer.at)) for t in turns[len(before) :]]
    recording = tmp_path / "night.jsonl.gz"
    write_recording(recording, Header("run-1", "prime-rl", "s1", turns[0].wall, 2.0, POLICIES), [*before, *kept])
    config = tmp_path / "podwatch.toml"
    config.write_text(
        'run_id = "run-1"\n[trainer]\nlayout = "prime-rl"\noutput_dir = "/x"\ncommand = ["a"]\n'
        '[gpu]\ninference = [0]\ntrainer = [1]\nhold = "60s"\n'
    )
    config.chmod(0o600)
    (as_recorded,) = died(document(recording))
    assert 1508.0 <= as_recorded <= 1515.0
    (at,) = died(document(recording, "-c", config))
    assert 1560.0 <= at <= 1570.0
    assert f"thresholds of {config}" in run(recording, "-c", config).output


def test_time_that_nobody_recorded_is_said(tmp_path: Path) -> None:
    turns = night()
    write_recording(tmp_path / "1.jsonl.gz", Header("r", session="a", policies=POLICIES), turns[:400])
    later = Header("r", session="b", wall=turns[600].wall, policies=POLICIES)
    write_recording(tmp_path / "2.jsonl.gz", later, turns[600:])
    found = document(tmp_path)
    (gap,) = found["gaps"]  # type: ignore[misc]
    assert gap["for_seconds"] == pytest.approx(402.0, abs=20.0)
    assert found["sessions"] == 2
    assert len(died(found)) == 1, "what was learned and armed goes on"
    assert "not recorded: " in run(tmp_path).output


def test_what_an_unwritten_session_had_learned_is_taken_from_the_next_one(tmp_path: Path) -> None:
    """podwatch was killed before its first turns reached the disk; the next one began with the engine dead already."""
    turns = night()
    state = initial(POLICIES)
    for turn in turns[:700]:
        state, _ = advance(state, turn, POLICIES)
    dead = [t for t in turns if t.at > 1610.0]
    write_recording(tmp_path / "1.jsonl.gz", Header("r", session="a", policies=POLICIES), [])
    write_recording(tmp_path / "2.jsonl.gz", Header("r", session="b", policies=POLICIES, learned=state.learned), dead)
    assert len(died(document(tmp_path))) == 1


def test_a_damaged_part_is_said_and_the_rest_is_judged(recording: Path, tmp_path: Path) -> None:
    for path in recording.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = tmp_path / "00000001-x.jsonl.gz"
    raw = bytearray(first.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    first.write_bytes(raw)
    result = run(tmp_path)
    assert result.exit_code == 0
    assert "problem: 00000001-x.jsonl.gz: " in result.output
    assert "would have restarted 1 time" in result.output


def test_a_recording_that_is_being_written(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "a.jsonl.gz", Header("r", policies=POLICIES))
    for turn in night():
        writer.turn(turn)
    writer.flush()
    assert len(died(document(tmp_path))) == 1
    writer.abandon()


def test_nothing_to_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PODWATCH_CONFIG", "")
    said = str(run().exception)
    assert said.startswith("no recording given, and no configuration file")
    assert "podwatch replay FILE" in said
    assert isinstance(run(tmp_path / "no").exception, UsageError)
    config = tmp_path / "podwatch.toml"
    config.write_text(
        f'run_id = "r"\nstate_dir = "{tmp_path}"\n[trainer]\nlayout = "prime-rl"\noutput_dir = "/x"\ncommand = ["a"]\n'
    )
    config.chmod(0o600)
    missing = run("-c", config).exception
    assert isinstance(missing, HostError)
    assert "[record] enabled" in missing.fix
    (tmp_path / "r" / "recording").mkdir(parents=True)
    write_recording(tmp_path / "r" / "recording" / "a.jsonl.gz", Header("r", policies=POLICIES), night(None, 0.1))
    assert "would have restarted 0 times" in run("-c", config).output
    wrong = run(tmp_path, "--since", "yesterday").exception
    assert isinstance(wrong, UsageError)


@pytest.mark.parametrize(("data", "why"), [(b"", "the file is empty"), (b"[" * 9000, "it has no whole line")])
def test_a_file_that_is_no_recording(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "x").write_bytes(data)
    assert why in str(run(tmp_path / "x").exception)


def test_what_a_hostile_recording_prints_cannot_move_the_cursor(tmp_path: Path) -> None:
    write_recording(tmp_path / "a.jsonl.gz", Header("r\x1b[2J", policies=POLICIES), night(None, 0.05))
    assert "\x1b" not in run(tmp_path).output
