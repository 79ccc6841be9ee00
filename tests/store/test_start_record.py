"""Names and texts from the store, as hostile as they can be: no path leaves the allowed directories, no record that
podwatch would not have written is used, no placeholder is filled by a guess."""

import json
import posixpath
import string
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.errors import IntegrityError
from podwatch.domain.secrets import MASK
from podwatch.store.runs.start_record import (
    USUAL_ROOTS,
    LeftOut,
    StartFile,
    StoredStart,
    filled,
    fits,
    placeable,
    placeholders,
    read_start,
)

SHA = "a" * 64
ROOTS = ("/etc/podwatch", "/root", *USUAL_ROOTS)
FOREIGN = ("/app/outputs", "/srv/state")

SEGMENT = st.one_of(
    st.sampled_from(["..", ".", "", "~", "root", "etc", "app", "outputs", ".ssh", ".bashrc", ".env", "a.env", "-rf",
                     "\\..\\", "%2e%2e", "\u202e", "\0", "\n", "con fig", "config.toml", "proc", "\ud800"]),
    st.text(max_size=6),
)  # fmt: skip
HOSTILE = st.builds(
    lambda start, parts, end: start + "/".join(parts) + end,
    st.sampled_from(["", "/", "//", "///", "/root/", "/app/", "/etc/podwatch/../", "file:///"]),
    st.lists(SEGMENT, max_size=6),
    st.sampled_from(["", "/", "/.", "/.."]),
)


def record(**changes: object) -> dict[str, object]:
    file = {"path": "/root/config.toml", "object": "aaaa-config.toml", "sha256": SHA, "size": 3, "mode": "0644",
            "secret": False}  # fmt: skip
    return {
        "schema_version": 1, "kind": "podwatch-bootstrap", "run_id": "r", "producer": "podwatch 1", "directory": "/app",
        "config": {**file, "path": "/podwatch.toml"}, "files": [file], "left_out": [], "settings": {}, **changes,
    }  # fmt: skip


def parse(document: object) -> StoredStart:
    return read_start(json.dumps(document).encode(), run_id="r")


def with_file(**changes: object) -> dict[str, object]:
    made = record()
    made["files"] = [{**made["files"][0], **changes}]  # type: ignore[index]
    return made


# -- paths


@given(HOSTILE)
def test_an_accepted_path_is_below_a_root_and_nothing_hides_in_it(path: str) -> None:
    try:
        (file,) = parse(with_file(path=path)).files
    except IntegrityError:
        return
    assert file.path == path == posixpath.normpath(path)
    assert path.isprintable() or all(c.isprintable() or ord(c) > 127 for c in path)
    if placeable(path, ROOTS, FOREIGN):
        return
    root = next(root for root in sorted(ROOTS, key=len, reverse=True) if path.startswith(root + "/"))
    inside = path.removeprefix(root + "/").split("/")
    assert inside
    assert all(part not in ("", ".", "..") for part in inside)
    assert not any(part.startswith(".") for part in inside[:-1])
    assert not inside[-1].startswith(".") or inside[-1].endswith(".env")
    assert not any(path == place or path.startswith(place + "/") for place in FOREIGN)


@pytest.mark.parametrize(
    ("path", "accepted"),
    [
        ("/root/config.toml", True),
        ("/root/.env", True),
        ("/root/.train.env", True),
        ("/app/configs/rl/a.toml", True),
        ("/etc/podwatch/extra.toml", True),
        ("/root/.bashrc", False),
        ("/root/.zshenv", False),
        ("/root/.ssh/authorized_keys", False),
        ("/root/.config/x.env", False),
        ("/etc/cron.d/x", False),
        ("/etc/podwatch", False),
        ("/etc/podwatch.toml", False),
        ("/rootkit/x", False),
        ("/usr/bin/python3", False),
        ("/app/outputs/checkpoints/step_5/x", False),
        ("/app/outputs", False),
        ("/srv/state/r/journal.sqlite", False),
    ],
)
def test_usual_paths(path: str, accepted: bool) -> None:
    assert (placeable(path, ROOTS, FOREIGN) == "") is accepted


@pytest.mark.parametrize("path", ["/proc/self/mem", "/sys/kernel/x", "/dev/shm/x"])
def test_allow_does_not_reach_beyond_disks(path: str) -> None:
    assert placeable(path, ("/", "/proc", "/dev"), ())
    assert placeable("/etc/cron.d/x", ("/",), ()) == "", "an explicit choice"


@pytest.mark.parametrize(
    "path", ["config.toml", "../x", "/a/../b", "/a//b", "//a", "/", "", "/a/", "/a/./b", "/a\n", 7]
)
def test_a_path_that_is_not_absolute_and_normal_voids_the_record(path: object) -> None:
    with pytest.raises(IntegrityError):
        parse(with_file(path=path))
    if path != "/":
        with pytest.raises(IntegrityError):
            parse(record(directory=path))


# -- the record


@pytest.mark.parametrize(
    "changes",
    [
        {"object": "../../other/podwatch/config/x"}, {"object": "a/b"}, {"object": ""}, {"object": ".hidden"},
        {"object": "x" * 300}, {"sha256": "A" * 64}, {"sha256": ""}, {"mode": "4755"}, {"mode": "0777"}, {"mode": 420},
        {"size": -1}, {"size": 1 << 40}, {"size": True}, {"size": "3"}, {"secret": None, "size": 1.5},
    ],
)  # fmt: skip
def test_a_file_that_podwatch_would_not_record(changes: dict[str, object]) -> None:
    with pytest.raises(IntegrityError):
        parse(with_file(**changes))


@pytest.mark.parametrize(
    "document",
    [
        [], None, record(kind="podwatch-manifest"), record(schema_version=2), record(run_id="other"),
        record(files=[record()["config"]] * 101), record(files={}), record(settings=[1]), record(settings={"a": 1}),
        record(left_out=[{"path": "/x", "reason": "\x1b[2J"}]), record(producer="\x1b]0;x\x07"),
        record(files=[{**record()["config"], "path": p} for p in ("/a/b", "/a/b")]),  # type: ignore[dict-item]
        record(files=[{**record()["config"], "path": p} for p in ("/a/b", "/a")]),  # type: ignore[dict-item]
    ],
)  # fmt: skip
def test_a_record_that_podwatch_would_not_write(document: object) -> None:
    with pytest.raises(IntegrityError):
        parse(document)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_start(data, run_id="r")


def test_a_record_survives_the_way_through_the_store() -> None:
    file = StartFile("/root/a.toml", "aa-a.toml", SHA, 3, "0755", True)
    made = StoredStart(
        "r",
        "/app",
        StartFile("/podwatch.toml", "bb", SHA, 1, "0600"),
        (file,),
        (LeftOut("/x", "big"),),
        {"a": "b"},
        "p",
    )
    assert read_start(made.to_bytes(), run_id="r") == made
    assert parse(record(directory="/")).directory == "/", "podwatch was started as process 1"


@pytest.mark.parametrize(
    "changes",
    [{"directory": "/other"}, {"files": []}, {"config": {**record()["config"], "sha256": "b" * 64}},  # type: ignore[dict-item]
     {"files": [{**record()["files"][0], "path": "/root/b"}]}, {"files": [{**record()["files"][0], "mode": "0755"}]},  # type: ignore[index]
     {"files": [{**record()["files"][0], "sha256": "b" * 64}]}, {"files": [{**record()["files"][0], "secret": True}]}],  # type: ignore[index]
)  # fmt: skip
def test_the_digest_covers_what_decides_the_start(changes: dict[str, object]) -> None:
    assert parse(record()).digest == parse(record(producer="podwatch 2", settings={"a": "b"})).digest
    assert parse(record(**changes)).digest != parse(record()).digest


# -- placeholders


def found(text: str, *, secret: bool = False) -> list[tuple[int, str, str]]:
    return [(p.line, p.key, p.variable) for p in placeholders(text, secret=secret)]


def test_each_placeholder_has_a_line_and_the_variable_that_its_line_names() -> None:
    text = (
        f'a = 1\napi_key = "{MASK}"\n[b]\napi-key = "{MASK}"\nWANDB_API_KEY = "{MASK}"\nx = "--token {MASK}"\n{MASK}\n'
    )
    assert found(text) == [
        (2, "api_key", ""),
        (4, "api-key", ""),
        (5, "WANDB_API_KEY", "WANDB_API_KEY"),
        (6, "token", ""),
        (7, "", ""),
    ]
    assert filled(text, placeholders(text, secret=False), {"": "x", "api_key": "x"})[0] == text


def test_in_a_file_for_secrets_each_variable_fills_itself_but_not_those_of_every_shell() -> None:
    assert found(f"HF_HOME={MASK}\nPATH={MASK}\nB2_APPLICATION_KEY={MASK}\n", secret=True) == [
        (1, "HF_HOME", "HF_HOME"),
        (2, "PATH", ""),
        (3, "B2_APPLICATION_KEY", "B2_APPLICATION_KEY"),
    ]


@pytest.mark.parametrize("value", ["", 'a"b', "a b", "a\nb", "a\\b", "it's", "a\x07b", "ü", MASK, f"x{MASK}"])
def test_a_value_that_could_change_the_file_is_not_filled_in(value: str) -> None:
    text = f'WANDB_API_KEY = "{MASK}"\n'
    holes = placeholders(text, secret=False)
    assert filled(text, holes, {"WANDB_API_KEY": value})[0] == text
    assert list(filled(text, holes, {"WANDB_API_KEY": value})[1]) == [holes[0].at]


def test_a_value_that_podwatch_keeps_to_itself_is_not_filled_in() -> None:
    text = f"WANDB_API_KEY={MASK}\n"
    assert filled(text, placeholders(text, secret=True), {"WANDB_API_KEY": "x1"}, {"x1"})[0] == text
    assert filled(text, placeholders(text, secret=True), {"WANDB_API_KEY": "x1"}, {"x2"})[0] == "WANDB_API_KEY=x1\n"


PIECE = st.text(alphabet=string.ascii_letters + '="\n [].', max_size=12).filter(lambda t: MASK not in t)
VALUE = st.text(alphabet=string.ascii_letters + string.digits + "/+=_-.:@", min_size=1, max_size=12)


@given(st.lists(PIECE, min_size=1, max_size=6), st.data())
def test_what_is_filled_in_fits_and_nothing_else_changes(pieces: list[str], data: st.DataObject) -> None:
    template = MASK.join(pieces)
    holes = [replace(hole, variable=f"V{n}") for n, hole in enumerate(placeholders(template, secret=True))]
    if len(holes) != len(pieces) - 1:
        return  # pieces that make a mask together
    values = [data.draw(VALUE) for _ in holes]
    text, left = filled(template, holes, {hole.variable: value for hole, value in zip(holes, values, strict=True)})
    assert not left
    expected = pieces[0] + "".join(value + piece for value, piece in zip(values, pieces[1:], strict=True))
    assert text == expected
    assert fits(template, text)
    assert fits(template, template)


@given(st.lists(PIECE, min_size=1, max_size=4), PIECE.filter(bool))
def test_a_file_that_differs_elsewhere_does_not_fit(pieces: list[str], more: str) -> None:
    template = MASK.join(["begin;", *pieces, ";end"])
    assert not fits(template, f"X{template}")
    assert not fits(template, f"{template}X")
    assert not fits("begin;\n", f"begin;\n{more}")
