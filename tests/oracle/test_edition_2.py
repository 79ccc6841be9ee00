"""The same pods, given to this podwatch and to the second edition: the same answers, or a reason in ``EXPLAINED``."""

import json
from pathlib import Path

import pytest

from tests.drivers.detection import read_night, write_as_recording, write_for_edition_2
from tests.support.golden import GOLDENS, Golden
from tests.support.oracle import (
    OURS,
    Answer,
    Ask,
    answer_of,
    both,
    both_running,
    compare,
    differences,
    second_edition,
    unexplained,
)

pytestmark = pytest.mark.slow

NIGHTS = Path(__file__).parents[1] / "detection" / "nights"

EXPLAINED: dict[tuple[str, str], str] = {
    ("*", "document.capabilities.leases"): "no read leases are taken any more",
    ("*", "document.capabilities.holes"): "every layout treats a file with unwritten ranges alike, on any file system",
    ("*", "document.searched"): "a directory that does not exist yet is not listed: its parent is watched",
    ("*", "document.sets.reason"): "the rules of the tables word it",
    ("*", "document.rejected.reason"): "the same",
    ("*", "document.sets.parts.reason"): "the same; what concerns the whole save is not said of a part",
    ("replay *", "document.findings.*"): "an engine's end counts as a death of its own, so other signals come first",
    ("replay *", "document.would_restart_at"): "the same: podwatch restarts sooner, as the test itself compares",
}
"""Case and place (``tests.support.oracle.unexplained``) of each difference that is wanted, and why."""

RUNNING = ("hf", "prime-rl:a", "torchtitan", "verl")
"""Given to a daemon, too: single directories, several parts, a save that cannot be resumed from, a tracker."""


def pod_with(golden: Golden, pod: Path) -> Path:
    """A pod that holds these checkpoints and has no training; its configuration file."""
    pod.mkdir()
    golden.copy(pod / "out")
    config = pod / "podwatch.toml"
    config.write_text(
        f'run_id = "golden"\nmode = "observe"\nstate_dir = "{pod}/state"\n'
        f'[trainer]\nlayout = "{golden.kind}"\noutput_dir = "{pod / "out" / golden.below}"\ncwd = "{pod}"\n'
        'command = ["python", "train.py"]\nsupervise = "start"\n'
        'nofile = 1024\n[checkpoints]\nsettle = 0\nsettle_tracker = 0\nsettle_weak = 0\nrescan = "0.3s"\n'
        "[disk]\nprune_above = 0.999\nprune_to = 0.99\n[http]\nport = 0\n"
    )
    config.chmod(0o600)
    return config


def new(case: str, pair: tuple[Answer, Answer]) -> dict[str, tuple[object, object]]:
    """The differences without a reason. A command that fails in both editions alike would compare nothing."""
    ours, _ = pair
    assert ours.document is not None, f"{case}: no JSON: {ours}"
    return unexplained(case, *pair, EXPLAINED)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.name)
def test_checkpoints_without_a_daemon(golden: Golden, tmp_path: Path) -> None:
    config = pod_with(golden, tmp_path / "pod")
    commands = (("checkpoints", "--json"), ("checkpoints", "verify", "--json"))
    pairs = compare(config, lambda ask: [ask(*command) for command in commands])
    assert [s["step"] for s in pairs[0][0].document["sets"]] == sorted((*golden.steps, *golden.others))
    for command, pair in zip(commands, pairs, strict=True):
        assert new(" ".join(command), pair) == {}


@pytest.mark.parametrize("golden", [g for g in GOLDENS if g.name in RUNNING], ids=lambda golden: golden.name)
def test_plans_of_a_daemon(golden: Golden, tmp_path: Path) -> None:
    config = pod_with(golden, tmp_path / "pod")

    def all_known(ask: Ask) -> bool:
        listed = ask("checkpoints", "--json").document or {"sets": []}
        of_daemon = "capabilities" in listed  # without one, the command looks by itself
        return of_daemon and len(listed["sets"]) > 1 and all(s["completeness"] != "writing" for s in listed["sets"])

    commands = (
        ("checkpoints", "--json"),
        ("prune", "--dry-run", "--json"),
        ("restart", "--dry-run", "--json"),
        ("restart", "--dry-run", "--json", "--step", str(golden.steps[0])),
    )
    pairs = both_running(commands, config, ready=all_known, flags=("--adopt-existing",))
    assert pairs[2][0].document["step"] == golden.steps[-1]
    for command, pair in zip(commands, pairs, strict=True):
        assert new(f"{' '.join(command)} beside a daemon", pair) == {}


def test_replay_of_recorded_nights(tmp_path: Path) -> None:
    """Each edition reads the nights in the form in which it records them."""
    pod = tmp_path / "pod"
    config = pod_with(GOLDENS[0], pod)
    nights = sorted(NIGHTS.glob("*.jsonl.xz"))
    assert len(nights) > 10
    for form, write in (("ours", write_as_recording), ("oracle", write_for_edition_2)):
        (pod / form).mkdir()
        for night in nights:
            write(pod / form / night.name.replace(".xz", ".gz"), read_night(night))
    forms = iter(("ours", "oracle"))

    def replays(ask: Ask) -> list[Answer]:
        recorded = sorted((pod / next(forms)).iterdir())
        return [ask("replay", str(recording), "--json") for recording in recorded]

    pairs = compare(config, replays)
    assert any(ours.document["would_restart_at"] for ours, _ in pairs)
    for night, pair in zip(nights, pairs, strict=True):
        assert new(f"replay {night.name}", pair) == {}
        ours, oracle = (answer.document["would_restart_at"] for answer in pair)
        assert len(ours) == len(oracle), "a restart too many, or one too few"
        assert all(one <= other for one, other in zip(ours, oracle, strict=True)), "a restart is later"


def test_what_cannot_be_asked_is_refused_alike(tmp_path: Path) -> None:
    config = pod_with(GOLDENS[0], tmp_path / "pod")
    ours, oracle = both(["prune", "--dry-run"], config)
    assert ours.code != 0
    assert unexplained("prune without a daemon", ours, oracle, EXPLAINED) == {}


def test_a_difference_is_found_and_its_reason_counts() -> None:
    def answer(**document: object) -> Answer:
        return answer_of(OURS, 0, json.dumps(document), "")

    one = answer(time="12:00", sets=[{"step": 1, "reason": "a"}], gone=None)
    two = answer(time="12:01", sets=[{"step": 1, "reason": "b"}])
    found = {"document.sets[0].reason": ("a", "b"), "document.gone": (None, "<missing>")}
    assert differences(one, two) == found
    explained = {("check*", "document.sets.reason"): "the new wording", ("other", "*"): "another command"}
    assert list(unexplained("checkpoints", one, two, explained)) == ["document.gone"]


def test_the_oracle_imports_nothing_of_this_checkout(tmp_path: Path) -> None:
    """Also with PYTHONPATH, and in a directory whose ``podwatch`` would be imported."""
    (tmp_path / "pod" / "podwatch").mkdir(parents=True)
    for name in ("__init__", "__main__"):
        (tmp_path / "pod" / "podwatch" / f"{name}.py").write_text("raise SystemExit('the wrong podwatch')\n")
    config = tmp_path / "pod" / "podwatch.toml"
    config.write_text("")
    ours, oracle = both(["--version"], config, environ={"PYTHONPATH": str(tmp_path / "pod")})
    assert "the wrong podwatch" in ours.err, "PYTHONPATH is read by who does not ignore it"
    assert (oracle.code, oracle.out.split()[0]) == (0, "podwatch")
    assert second_edition().command[0].endswith(".venv-edition-2/podwatch")
