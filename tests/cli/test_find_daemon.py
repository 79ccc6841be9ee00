"""Finding runs, endpoint files, and the words for times and sizes."""

import json
import os

import pytest

from podwatch.cli.find_daemon import choose, find_runs, locate, read_hints, searched, training_lives
from podwatch.domain.errors import ConfigurationError, UsageError
from podwatch.domain.times import ago, from_rfc3339, rfc3339, size, span
from podwatch.system.endpoint import (
    RUNTIME_LINK,
    Endpoint,
    boot_id,
    own_endpoint,
    process_alive,
    read_endpoint,
    start_ticks,
    write_endpoint,
)


def publish(root, name, *, alive=True, **fields):
    directory = root / name
    directory.mkdir(parents=True)
    endpoint = (
        own_endpoint(name, started_wall=1.0, **fields) if alive else Endpoint(name, 1, stopped_wall=5.0, **fields)
    )
    write_endpoint(directory, endpoint)
    return directory


def test_roots_in_order_without_duplicates(tmp_path):
    environ = {"RUNTIME_DIRECTORY": "/run/podwatch:/run/x"}
    assert [str(p) for p in searched(environ)] == ["/run/podwatch", "/run/x"]
    assert [str(p) for p in searched(environ | {"PODWATCH_RUNTIME_DIR": "/run/y"})] == ["/run/y"]


def test_a_written_endpoint_is_read_back_and_alive(tmp_path):
    directory = publish(tmp_path, "one", http_url="http://127.0.0.1:1")
    endpoint = read_endpoint(directory)
    assert (endpoint.run_id, endpoint.pid, endpoint.http_url) == ("one", os.getpid(), "http://127.0.0.1:1")
    assert endpoint.alive()
    assert (directory / "endpoint.json").stat().st_mode & 0o777 == 0o644
    assert [p.name for p in directory.iterdir()] == ["endpoint.json"]


def test_an_endpoint_that_is_no_file_holds_no_command_up(tmp_path):
    (tmp_path / "one").mkdir()
    os.mkfifo(tmp_path / "one" / "endpoint.json")
    assert read_endpoint(tmp_path / "one") is None


def test_training_of_a_start_after_the_last_document_lives(tmp_path):
    """podwatch was killed just after it restarted training: only the supervisor's record names the new launcher."""
    record = {"boot_id": boot_id(), "pid": os.getpid(), "ticks": start_ticks(os.getpid())}
    document = {"training": {"pid": 2**22 + 1, "start_ticks": 5}, "daemon": {"state_dir": str(tmp_path)}}
    assert training_lives(document) is False
    (tmp_path / "supervisor").mkdir()
    path = tmp_path / "supervisor" / "record.json"
    for changed, lives in ({}, True), ({"ticks": 7}, False), ({"boot_id": "another"}, False), ({"pid": "x"}, False):
        path.write_text(json.dumps(record | changed))
        assert training_lives(document) is lives
    path.write_text(json.dumps(record))
    assert training_lives({"daemon": document["daemon"]}) is True
    path.write_text("torn")
    assert training_lives({"daemon": document["daemon"]}) is None


def test_a_pid_used_again_is_not_the_daemon():
    ticks = start_ticks(os.getpid())
    assert process_alive(os.getpid(), ticks)
    assert not process_alive(os.getpid(), ticks + 1)
    assert not Endpoint("r", os.getpid(), ticks, boot_id="another-boot").alive()


def test_the_living_one_is_meant(tmp_path):
    publish(tmp_path, "dead", alive=False)
    publish(tmp_path, "alive")
    runs = find_runs({"PODWATCH_RUNTIME_DIR": str(tmp_path)})
    assert [f.endpoint.run_id for f in runs] == ["alive", "dead"]
    assert choose(runs, "").endpoint.run_id == "alive"
    assert choose(runs, "dead").endpoint.run_id == "dead"
    assert choose([], "x") is None
    with pytest.raises(UsageError):
        choose(runs, "neither")


def test_a_run_in_two_places_is_the_living_one(tmp_path):
    publish(tmp_path / "a", "r", alive=False)
    publish(tmp_path / "b", "r")
    runs = find_runs({"RUNTIME_DIRECTORY": f"{tmp_path}/a:{tmp_path}/b"})
    ours = [f for f in runs if f.endpoint.run_id == "r"]
    assert [(f.alive, f.directory.parent.name) for f in ours] == [(True, "b")]


def test_the_configuration_here_says_where_to_look(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published = publish(tmp_path / "elsewhere", "mine")
    (tmp_path / "state" / "mine").mkdir(parents=True)
    (tmp_path / "state" / "mine" / RUNTIME_LINK).symlink_to(published)
    environ = {"RUNTIME_DIRECTORY": str(tmp_path / "none")}
    (tmp_path / "podwatch.toml").write_text(f'run_id = "mine"\nstate_dir = "{tmp_path}/state"\n')
    assert locate("mine", environ=environ).endpoint.run_id == "mine"
    assert locate("mine", "podwatch.toml", environ).endpoint.run_id == "mine"


@pytest.mark.parametrize("text", ["run_id = [", "\xff"])
def test_a_named_file_that_cannot_be_read_is_said(tmp_path, text):
    path = tmp_path / "x.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError, match="TOML"):
        read_hints(str(path), {})
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_hints(str(tmp_path / "none.toml"), {})


def test_odd_types_in_the_file_are_no_hints(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text("run_id = 5\nstate_dir = [1]\n")
    hints = read_hints(str(path), {})
    assert (hints.run_id, hints.state_dir) == ("", None)


def test_times_there_and_back():
    assert rfc3339(1_769_832_000.25) == "2026-01-31T04:00:00.250Z"
    assert from_rfc3339("2026-01-31T04:00:00.250Z") == 1_769_832_000.25
    assert from_rfc3339("2026-01-31T04:00:00Z") == 1_769_832_000.0
    assert [from_rfc3339(x) for x in (None, "", "now", "2026-01-31T04:00:00+01:00", 5)] == [None] * 5
    assert [rfc3339(x) for x in (None, 0.0, float("nan"))] == [None] * 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (18.4, "18 s"),
        (119, "119 s"),
        (240, "4 min"),
        (3600, "1 h"),
        (4320, "1 h 12 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_spans(seconds, text):
    assert span(seconds) == text


def test_ago_and_sizes():
    assert [ago(x) for x in (None, 0.2, -5, 18)] == ["never", "just now", "just now", "18 s ago"]
    assert [size(x) for x in (None, 0, 999, 47e9, 1.5e12)] == ["?", "0 B", "999 B", "47 GB", "1.5 TB"]
