"""URLs, and the access to a store: which key, from where, and what is refused."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podwatch.config.settings import Settings
from podwatch.domain.errors import ConfigurationError, PermissionDenied
from podwatch.store.objects.access import access_for, access_from, variables_of
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.directory import DirectoryObjects, is_on_file_system_of
from podwatch.store.objects.open import StoreUrl, open_objects, parse_url
from podwatch.store.objects.s3 import S3Access, S3Objects
from tests.support.s3server import BUCKET, KEY, KEY_ID, S3Server

B2 = {"B2_APPLICATION_KEY_ID": "0011", "B2_APPLICATION_KEY": "K001-in-the-environment"}
S3 = {"AWS_ACCESS_KEY_ID": "AKID-1234567", "AWS_SECRET_ACCESS_KEY": "environment-secret"}


def test_urls(tmp_path: Path) -> None:
    assert parse_url("b2://my-bucket/a/b/") == StoreUrl("b2", "my-bucket", "a/b")
    assert parse_url("s3://my.bucket") == StoreUrl("s3", "my.bucket")
    assert parse_url("file:///mnt/x%20y").path == Path("/mnt/x y")
    store = open_objects(f"file://{tmp_path}", None)
    assert isinstance(store, DirectoryObjects)
    assert store.url == f"file://{tmp_path}"


@pytest.mark.parametrize(
    "url",
    [
        "s3://x", "file://relative", "file:///a/../b", "b2://", "b2://x", "b2://key:secret@bucket-name",
        "b2://bucket-name/a/../b", "s3://bucket-name/lab#2", "b2://bucket-name/lab?x=1", "ftp://bucket-name",
    ],
)  # fmt: skip
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_url(url)
    assert caught.value.fix
    assert "secret" not in str(caught.value)


def test_a_bucket_needs_a_key() -> None:
    assert access_from("b2://my-bucket", {}) is None
    with pytest.raises(ConfigurationError, match="no credentials"):
        open_objects("b2://my-bucket", None)
    with pytest.raises(ConfigurationError, match="no credentials"):
        open_objects("s3://my-bucket", B2Access("x", "y"))


@pytest.mark.parametrize(
    ("url", "values"),
    [
        ("b2://my-bucket", {"B2_APPLICATION_KEY_ID": "e"}),
        ("b2://my-bucket", {"B2_APPLICATION_KEY": "e"}),
        ("s3://my-bucket", {"AWS_ACCESS_KEY_ID": "AKID-1234567"}),
        ("s3://my-bucket", S3 | {"PODWATCH_AWS_SECRET_ACCESS_KEY": "another-half"}),
    ],
)
def test_half_a_key_is_refused(url: str, values: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="half") as caught:
        access_from(url, values)
    assert not any(value in str(caught.value) for value in values.values() if len(value) > 1)


def test_where_a_key_is_found(tmp_path: Path) -> None:
    """systemd's credentials count before the env file, and that before the environment."""
    url = "b2://my-bucket"
    assert access_from(url, B2 | {"B2_ENVIRONMENT": "http://x"}) == B2Access(*B2.values(), "http://x")
    file = tmp_path / "env"
    file.write_text("# c\nexport B2_APPLICATION_KEY_ID=f\nB2_APPLICATION_KEY='2'\nOTHER=x\n")
    file.chmod(0o640)
    with pytest.raises(PermissionDenied) as caught:
        access_from(url, {}, file)
    assert f"chmod 600 {file}" in str(caught.value)
    file.chmod(0o600)
    assert access_from(url, B2, file) == B2Access("f", "2")
    (tmp_path / "credentials").mkdir()
    (tmp_path / "credentials" / "B2_APPLICATION_KEY_ID").write_text("d\n")
    (tmp_path / "credentials" / "b2_application_key").write_text("3\n")
    environ = B2 | {"CREDENTIALS_DIRECTORY": str(tmp_path / "credentials")}
    assert access_from(url, environ, file) == B2Access("d", "3")
    assert access_from(url, {}, tmp_path / "absent") is None
    assert access_from("file:///mnt", environ, file) is None


def test_keys_of_s3(tmp_path: Path) -> None:
    url = "s3://my-bucket"
    found = access_from(url, S3 | {"AWS_SESSION_TOKEN": "token-abcdefg", "AWS_REGION": "r"})
    assert found == S3Access(*S3.values(), "token-abcdefg", region="r")
    assert "environment-secret" not in repr(found)
    assert access_from(url, {}) == S3Access(), "boto3 looks for them"
    own = {"PODWATCH_AWS_ACCESS_KEY_ID": "AKID-podwatch", "PODWATCH_AWS_SECRET_ACCESS_KEY": "podwatch-secret"}
    found = access_from(url, S3 | {"AWS_SESSION_TOKEN": "of-training"} | own)
    assert found == S3Access("AKID-podwatch", "podwatch-secret"), "never mixed with those of training"
    assert access_from(url, variables_of(found)) == found, "another podwatch gets the same"
    both = S3 | {"AWS_ENDPOINT_URL": "https://all", "AWS_ENDPOINT_URL_S3": "https://s3/"}
    assert isinstance(found := access_from(url, both), S3Access)
    assert found.endpoint == "https://s3"
    for bad in ("s3.example", "ftp://x", "https://user:pw@x", "https://x/bucket"):
        with pytest.raises(ConfigurationError):
            access_from(url, S3, s3={"endpoint": bad})


def test_the_settings_of_s3_count_before_the_environment(tmp_path: Path) -> None:
    sync = {"store": "s3://my-bucket", "s3_endpoint": "http://set:9000", "s3_region": "auto", "s3_profile": "lab"}
    settings = Settings.model_validate({"run_id": "r", "trainer": {"output_dir": tmp_path}, "sync": sync})
    environ = S3 | {"AWS_ENDPOINT_URL": "https://all", "AWS_REGION": "r"}
    assert access_for(settings, environ) == S3Access(endpoint="http://set:9000", region="auto", profile="lab")


def test_a_directory_on_the_same_file_system(tmp_path: Path) -> None:
    assert is_on_file_system_of(f"file://{tmp_path}/not/yet", tmp_path / "out")
    assert not is_on_file_system_of("file:///proc/x", tmp_path)


def test_a_directory_needs_no_library_of_a_bucket(tmp_path: Path) -> None:
    code = f"""
import sys
from podwatch.store.objects.open import open_objects
open_objects("file://{tmp_path}", None)
assert not {{"b2sdk", "boto3", "botocore"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bucket_in_the_host_name(
    s3: Callable[..., S3Objects], s3server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def resolve(host: str, *more: Any, **options: Any) -> Any:
        return real("127.0.0.1" if host == f"{BUCKET}.s3.test" else host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    endpoint = f"http://s3.test:{s3server.port}"
    store = s3(S3Access(KEY_ID, KEY, endpoint=endpoint, addressing="virtual"), styles=["virtual"])
    assert store.check("virtual/").warnings == ()
    store.put("virtual/a b", b"1")
    assert [item.key for item in store.list("virtual/")] == ["virtual/a b"]
