"""URLs and credentials."""

import subprocess
import sys
from pathlib import Path

import pytest

from podwatch.domain.errors import ConfigurationError, PermissionDenied
from podwatch.stores.credentials import Credentials, credentials_from_environment
from podwatch.stores.open_store import StoreLocation, open_store, parse_store_url, same_filesystem


def test_urls(tmp_path: Path) -> None:
    assert parse_store_url("b2://my-bucket/a/b/") == StoreLocation("b2", "my-bucket", "a/b")
    assert parse_store_url("b2://my-bucket") == StoreLocation("b2", "my-bucket")
    assert parse_store_url("file:///mnt/x%20y").path == Path("/mnt/x y")
    store = open_store(f"file://{tmp_path}", None, writer_id="w")
    assert store.url == f"file://{tmp_path}"


@pytest.mark.parametrize(
    "url",
    [
        "s3://x",
        "file://relative",
        "file:///a/../b",
        "b2://",
        "b2://x",
        "b2://key:secret@bucket-name",
        "b2://bucket-name/a/../b",
        "s3://bucket-name/lab#2",
        "b2://bucket-name/lab?x=1",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_store_url(url)
    assert caught.value.fix
    assert "secret" not in str(caught.value)


def test_b2_needs_credentials() -> None:
    with pytest.raises(ConfigurationError, match="no credentials"):
        open_store("b2://my-bucket", None, writer_id="w")


def test_credentials(tmp_path: Path) -> None:
    assert credentials_from_environment({}) is None
    env = {"B2_APPLICATION_KEY_ID": "e", "B2_APPLICATION_KEY": "1", "B2_ENVIRONMENT": "http://x"}
    assert credentials_from_environment(env) == Credentials("e", "1", "http://x")
    with pytest.raises(ConfigurationError, match="half"):
        credentials_from_environment({"B2_APPLICATION_KEY_ID": "e"})
    file = tmp_path / "env"
    file.write_text("# c\nexport B2_APPLICATION_KEY_ID=f\nB2_APPLICATION_KEY='2'\nOTHER=x\n")
    file.chmod(0o640)
    with pytest.raises(PermissionDenied) as caught:
        credentials_from_environment({}, file)
    assert f"chmod 600 {file}" in str(caught.value)
    file.chmod(0o600)
    assert credentials_from_environment(env, file) == Credentials("f", "2", "http://x")
    directory = tmp_path / "creds"
    directory.mkdir()
    (directory / "B2_APPLICATION_KEY_ID").write_text("d\n")
    (directory / "b2_application_key").write_text("3\n")
    assert credentials_from_environment({}, file, directory) == Credentials("d", "3")
    assert credentials_from_environment({}, tmp_path / "absent") is None


def test_same_filesystem(tmp_path: Path) -> None:
    assert same_filesystem(f"file://{tmp_path}/not/yet", tmp_path / "out")
    assert not same_filesystem("file:///proc/x", tmp_path)
    assert not same_filesystem("b2://my-bucket", tmp_path)


def test_b2sdk_is_imported_only_when_needed(tmp_path: Path) -> None:
    code = f"""
import sys
from podwatch.stores.open_store import open_store
open_store("file://{tmp_path}", None, writer_id="w")
assert "b2sdk" not in sys.modules and "requests" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


MEANWHILE = """
import sys, threading
from podwatch.stores.open_store import load
loading = threading.Thread(target=load, args=("b2",))
loading.start()
while loading.is_alive() and "b2sdk" not in sys.modules:
    pass
import pydantic
loading.join()
"""


def test_another_thread_can_import_pydantic_while_b2_is_loaded() -> None:
    """The daemon reads documents while it opens its store."""
    done = subprocess.run([sys.executable, "-c", MEANWHILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
