"""Which files are refused as the HTTP password."""

from pathlib import Path

import pytest

from podwatch.app.settings_in_force import http_password
from podwatch.config.settings import HttpSettings
from podwatch.domain.errors import ConfigurationError
from podwatch.domain.secrets import scrub

PASSWORD = "correct-horse-battery-staple"


def kept(tmp_path: Path, text: bytes, mode: int = 0o600) -> HttpSettings:
    path = tmp_path / "password"
    path.write_bytes(text)
    path.chmod(mode)
    return HttpSettings(password_file=path)


def test_the_password_of_a_file_is_never_shown(tmp_path: Path) -> None:
    assert http_password(HttpSettings()) == ""
    assert http_password(kept(tmp_path, f"{PASSWORD}\n".encode())) == PASSWORD
    assert PASSWORD not in scrub(f"the answer is {PASSWORD}")


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (PASSWORD.encode(), 0o640, "read by other users"),
        (b"fifteen-letters", 0o600, "at least 16"),
        (b"", 0o600, "at least 16"),
        (b"sixteen-letters-\nand a second line", 0o600, "one line"),
        (b"\xff" * 20, 0o600, "not valid UTF-8"),
    ],
)
def test_a_file_that_is_refused(text: bytes, mode: int, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=why):
        http_password(kept(tmp_path, text, mode))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        http_password(HttpSettings(password_file=tmp_path / "none"))
