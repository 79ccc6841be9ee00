"""Where an S3 store's credentials and certificates come from: files that nobody else can write, and no program."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from podwatch.domain.secrets import scrub
from podwatch.store.objects.b2 import B2Access, B2Objects
from podwatch.store.objects.base import Retry
from podwatch.store.objects.errors import StoreRefused
from podwatch.store.objects.s3 import S3Access, S3Objects
from tests.support.b2server import BUCKET as B2_BUCKET
from tests.support.b2server import KEY as B2_KEY
from tests.support.b2server import KEY_ID as B2_KEY_ID
from tests.support.b2server import B2Server
from tests.support.s3server import BUCKET, KEY, KEY_ID, S3Server

KEYS = f"aws_access_key_id = {KEY_ID}\naws_secret_access_key = {KEY}\n"


@dataclass
class Home:
    path: Path
    server: S3Server

    def write(self, name: str, text: str, mode: int = 0o600) -> Path:
        file = self.path / name
        file.write_text(text)
        file.chmod(mode)
        return file

    def use(self, profile: str = "") -> None:
        store = S3Objects(BUCKET, S3Access(endpoint=self.server.url, profile=profile), retry=Retry(attempts=1))
        try:
            store.put("credentials/a", b"1")
            assert store.read("credentials/a") == b"1"
        finally:
            store.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3server: S3Server) -> Home:
    (tmp_path / ".aws").mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_ACCESS_KEY_ID",
                 "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    return Home(tmp_path / ".aws", s3server)


def test_keys_of_a_profile_are_used_and_never_shown(home: Home) -> None:
    home.write("credentials", f"[default]\n{KEYS}[other]\n{KEYS}")
    home.use()
    home.use("other")
    assert KEY not in scrub(f"the log has {KEY} in it")


def test_temporary_keys_are_never_shown(home: Home) -> None:
    secret, token = "temporary-secret-1f7c93", "session-token-of-a-role-77aa"
    home.write("credentials", f"[default]\n{KEYS.replace(KEY, secret)}aws_session_token = {token}\n")
    with pytest.raises(StoreRefused):
        home.use()
    shown = scrub(f"one {secret} two {token}")
    assert secret not in shown
    assert token not in shown


@pytest.mark.parametrize("name", ["config", "credentials"])
@pytest.mark.parametrize("where", ["directory", "file", "link"])
def test_files_that_others_can_write_or_replace_are_refused(home: Home, name: str, where: str) -> None:
    file = home.write(name, f"[default]\n{KEYS}")
    home.use()
    if where == "directory":
        home.path.chmod(0o777)
    elif where == "file":
        file.chmod(0o622)
    else:
        shared = home.path.parent / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        file.rename(shared / name)
        file.symlink_to(shared / name)
    with pytest.raises(StoreRefused) as caught:
        home.use()
    assert caught.value.kind == "key"


def test_a_file_of_secrets_that_others_can_read_is_refused(home: Home) -> None:
    home.write("credentials", f"[default]\n{KEYS}", mode=0o644)
    with pytest.raises(StoreRefused, match="read by other users"):
        home.use()
    home.write("credentials", f"[default]\n{KEYS}")
    home.write("config", "[default]\nregion = us-east-1\n", mode=0o644)
    home.use()


@pytest.mark.parametrize("profile", ["", "runs", "role"])
def test_no_program_is_started_for_a_key(home: Home, profile: str) -> None:
    witness = home.path / "started"
    program = home.write("program", f"#!/bin/sh\ntouch {witness}\n", mode=0o700)
    process = f"credential_process = {program}\n"
    role = "role_arn = arn:aws:iam::1:role/x\nsource_profile = runs\n"
    home.write("config", f"[default]\n{process}[profile runs]\n{process}[profile role]\n{role}")
    with pytest.raises(StoreRefused, match="credential_process") as caught:
        home.use(profile)
    assert caught.value.kind == "key"
    assert not witness.exists()


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"])
def test_certificates_that_others_can_write_are_refused(
    home: Home, variable: str, monkeypatch: pytest.MonkeyPatch, b2server: B2Server
) -> None:
    home.write("credentials", f"[default]\n{KEYS}")
    ca = home.write("ca.pem", "not used over http\n", mode=0o666)
    monkeypatch.setenv(variable, str(ca))

    def b2() -> None:
        store = B2Objects(B2_BUCKET, B2Access(B2_KEY_ID, B2_KEY, b2server.url), retry=Retry(attempts=1))
        store.put("credentials/a", b"1")
        store.close()

    uses: list[Callable[[], None]] = [home.use] if variable.startswith("AWS") else [home.use, b2]
    for use in uses:
        with pytest.raises(StoreRefused, match="certificates"):
            use()
    ca.chmod(0o600)
    for use in uses:
        use()
