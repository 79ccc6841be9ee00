"""The tests' B2 server is honest if clients that know nothing of us upload, list, compare, copy, read and remove
through it; and what podwatch published is readable by them all."""

import hashlib
import io
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from b2sdk.v2 import B2Api, InMemoryAccountInfo

from podwatch.store.keys import MANIFEST, RunKeys
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.open import open_objects
from tests.suites.clients.conftest import FIVE_MB, Client
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.stored_save import Shelf

pytestmark = pytest.mark.timeout(600)  # each of a dozen commands of foreign programs may take two minutes

SIZES = {
    "empty": 0, "small.json": 12, "sub/space and + and ümlaut %41.bin": 100_000, "exact": FIVE_MB,
    "large.bin": 12_345_678,
}  # fmt: skip


def content(name: str, size: int) -> bytes:
    block = hashlib.sha512(name.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, size in SIZES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name, size))
    return root


def test_what_one_does_with_files(client: Client, server: B2Server, directory: Path, tmp_path: Path) -> None:
    client.upload(directory, "up/here")
    assert client.sizes("up/here") == SIZES
    assert server.calls()["b2_upload_part"] >= 2, "the large one went in parts"
    assert not client.differs(directory, "up/here")
    for name in SIZES:
        client.download(f"up/here/{name}", tmp_path / "back")
        assert (tmp_path / "back").read_bytes() == content(name, SIZES[name]), name
    client.copy("up/here/small.json", "copied/small.json")
    client.copy("up/here/large.bin", "copied/large.bin")
    client.download("copied/large.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content("large.bin", SIZES["large.bin"])
    (directory / "small.json").write_bytes(b"longer than it was before")
    assert client.differs(directory, "up/here"), "a comparison that never differs proves nothing"
    client.upload(directory, "up/here")
    assert client.sizes("up/here")["small.json"] == 25
    client.remove("up/here")
    assert client.sizes("") == {"copied/small.json": 12, "copied/large.bin": SIZES["large.bin"]}
    assert not [v for v in server.versions() if v["action"] == "start"]


def test_through_a_service_that_stumbles(client: Client, server: B2Server, directory: Path, tmp_path: Path) -> None:
    server.fault("b2_upload_part", "status", count=2)
    server.fault("b2_upload_file", "status", code="service_unavailable", skip=1)
    server.fault("b2_upload_part", "reset", after_bytes=1_000_000, skip=2)
    client.upload(directory, "up")
    assert client.sizes("up") == SIZES
    client.download("up/large.bin", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content("large.bin", SIZES["large.bin"])


def test_what_podwatch_stored(client: Client, server: B2Server, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "large.bin").write_bytes(content("large", 12_000_000))
    (source / "sub" / "name with spaces, ümlaut + plus").write_bytes(b"small")
    (source / "empty").touch()
    access = B2Access(KEY_ID, KEY, server.url)
    shelf = Shelf(lambda: open_objects(f"b2://{BUCKET}", access), RunKeys("run"), piece_size=FIVE_MB)
    manifest, folder = shelf.save(10, {"trainer": source}), shelf.folder(10)
    client.download(shelf.keys.latest, tmp_path / "latest.json")
    assert json.loads((tmp_path / "latest.json").read_bytes())["step"] == 10
    client.download(folder + MANIFEST, tmp_path / "manifest.json")
    assert (tmp_path / "manifest.json").read_bytes() == manifest.to_bytes()
    back = dict.fromkeys((file.name for file in manifest.files), b"")
    for piece in manifest.objects():
        client.download(folder + piece.name, tmp_path / "back")
        data = (tmp_path / "back").read_bytes()
        assert f"sha1:{hashlib.sha1(data).hexdigest()}" == piece.hash, piece.name
        back[piece.name.partition(".piece-")[0]] += data
    assert back == {f"trainer/{p.relative_to(source)}": p.read_bytes() for p in source.rglob("*") if p.is_file()}
    assert set(client.sizes(folder.rstrip("/"))) >= {piece.name for piece in manifest.objects()}
    assert server.violations() == []


def test_the_older_interface_of_the_sdk(server: B2Server, tmp_path: Path) -> None:
    """b2sdk.v2 speaks API v3."""
    api = B2Api(InMemoryAccountInfo())
    api.authorize_account(server.url, KEY_ID, KEY)
    bucket = api.get_bucket_by_name(BUCKET)
    data = content("v3", 12_000_000)
    (tmp_path / "f").write_bytes(data)
    bucket.upload_local_file(str(tmp_path / "f"), "v3/large")
    bucket.upload_bytes(b"abc", "v3/small")
    assert {f.file_name: f.size for f, _ in bucket.ls("v3")} == {"v3/large": 12_000_000, "v3/small": 3}
    back = io.BytesIO()
    bucket.download_file_by_name("v3/large").save(back)
    assert back.getvalue() == data
    bucket.hide_file("v3/small")
    assert [f.file_name for f, _ in bucket.ls("v3")] == ["v3/large"]
    bucket.unhide_file("v3/small")
    assert len(list(bucket.ls("v3"))) == 2


def test_ranges_heads_and_errors(server: B2Server) -> None:
    """What HTTP itself promises, asked with nothing but HTTP."""
    api = B2Api(InMemoryAccountInfo())
    api.authorize_account(server.url, KEY_ID, KEY)
    api.get_bucket_by_name(BUCKET).upload_bytes(b"0123456789", "r")
    token = api.account_info.get_account_auth_token()

    def ask(wanted: str, method: str = "GET") -> tuple[int, bytes, str]:
        headers = {"Authorization": token} | ({"Range": wanted} if wanted else {})
        request = urllib.request.Request(f"{server.url}/file/{BUCKET}/r", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Date"]
            return answer.status, answer.read(), answer.headers["Content-Length"]

    assert ask("") == (200, b"0123456789", "10")
    assert ask("bytes=2-4") == (206, b"234", "3")
    assert ask("bytes=8-100") == (206, b"89", "2")
    assert ask("bytes=-3") == (206, b"789", "3")
    assert ask("", "HEAD") == (200, b"", "10")
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask("bytes=10-")
    assert caught.value.code == 416
    assert server.classes()["B"] == 6
