"""The environment of training: parsing, permissions, precedence, scrubbing."""

import os
from pathlib import Path

import pytest

from podwatch.config.env_files import parse_env
from podwatch.domain.errors import ConfigurationError
from podwatch.trainer.environment import build_environment


def test_parse() -> None:
    text = (
        '# comment\n\nA=1\nexport B = two words \nC=\'single $HOME # kept\'\nD="double \\"q\\" \\$x"  # note\n'
        "E=value # note\nF=a#b\nG=\nH=x=y\nI=''\n"
    )
    assert parse_env(text, where="f") == {
        "A": "1",
        "B": "two words",
        "C": "single $HOME # kept",
        "D": 'double "q" $x',
        "E": "value",
        "F": "a#b",
        "G": "",
        "H": "x=y",
        "I": "",
    }


def test_lines_end_as_for_systemd() -> None:
    assert parse_env('A=1\r\nB=2\rC="3\u2028\x0b\x85"\n', where="f") == {"A": "1", "B": "2", "C": "3\u2028\x0b\x85"}


@pytest.mark.parametrize(
    "line", ["no equals sekret", "1A=sekret", "A B=sekret", "A='sekret", 'A="sekret\\"', "A='a'sekret"]
)
def test_bad_lines_name_the_line_and_not_the_secret(line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_env(f"OK=1\n{line}\n", where="/root/.env")
    assert "/root/.env line 2" in str(caught.value)
    assert "sekret" not in str(caught.value)


def test_precedence_scrubbing_and_home(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("SHARED=file\nWANDB_API_KEY=w\nB2_APPLICATION_KEY=never\n")
    env_file.chmod(0o600)
    base = {"SHARED": "base", "KEPT": "1", "B2_X": "x", "PODWATCH_CONFIG": "x", "NOTIFY_SOCKET": "x"}
    made = build_environment(base, {"SHARED": "config", "PODWATCH_STEP": "5", "PODWATCH_EVIL": "x"}, env_file)
    assert made["SHARED"] == "file"
    assert made["KEPT"] == "1"
    assert made["PODWATCH_STEP"] == "5"
    assert made["HOME"]
    assert made["PATH"]
    assert not {"B2_X", "B2_APPLICATION_KEY", "PODWATCH_CONFIG", "PODWATCH_EVIL", "NOTIFY_SOCKET"} & set(made)
    other = build_environment({"HOME": "/root", "USER": "root"}, {}, None, user="nobody")
    assert other["USER"] == "nobody"
    assert other["HOME"] != "/root"
    assert build_environment({"HOME": "/root"}, {"HOME": "/x"}, None, user="nobody")["HOME"] == "/x"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_an_open_file_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / ".env"
    path.write_text("A=1")
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"chmod 600 {path}"):
        build_environment({}, {}, path)


def test_other_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read"):
        build_environment({}, {}, tmp_path / "missing")
    path = tmp_path / ".env"
    path.write_bytes(b"A=\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="UTF-8"):
        build_environment({}, {}, path)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
        with pytest.raises(ConfigurationError, match="belongs to uid 12345"):
            build_environment({}, {}, path)
    with pytest.raises(ConfigurationError, match="not a valid name"):
        build_environment({}, {"A B": "1"}, None)
