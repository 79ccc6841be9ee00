"""What podwatch has stored, read by other people's clients; and their requests against the tests' server."""

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.store.objects.s3 import S3Access, S3Objects
from tests.suites.s3.conftest import aws, tool
from tests.support.s3server import BUCKET, KEY, KEY_ID, S3Server

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def stored(server: S3Server) -> dict[str, str]:
    """Name -> SHA-256 of two objects of podwatch."""
    store = S3Objects(BUCKET, S3Access(KEY_ID, KEY, endpoint=server.url))
    bodies = {"step_1/a/large file+ä.bin": hashlib.sha512(b"x").digest() * (12 * MIB // 64), "latest.json": b"{}"}
    for name, data in bodies.items():
        store.put(f"run/podwatch/{name}", data)
    store.close()
    return {name.rpartition("/")[2]: hashlib.sha256(data).hexdigest() for name, data in bodies.items()}


def rclone(server: S3Server, *arguments: str) -> str:
    environment = aws(server.url) | {
        "RCLONE_CONFIG": "/nonexistent/none.conf", "RCLONE_CONFIG_S_TYPE": "s3", "RCLONE_CONFIG_S_PROVIDER": "Other",
        "RCLONE_CONFIG_S_ACCESS_KEY_ID": KEY_ID, "RCLONE_CONFIG_S_SECRET_ACCESS_KEY": KEY,
        "RCLONE_CONFIG_S_ENDPOINT": server.url,
    }  # fmt: skip
    done = subprocess.run([tool("rclone"), *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def boto(server: S3Server, script: str, *arguments: str, **environment: str) -> str:
    code = (
        "import boto3, sys, json\ns3 = boto3.client('s3', region_name='us-east-1')\nBUCKET = 'test-bucket'\n" + script
    )
    done = subprocess.run(
        [tool("python"), "-c", code, *arguments],
        env=aws(server.url) | environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_rclone_reads_it(server: S3Server, stored: dict[str, str], tmp_path: Path) -> None:
    rclone(server, "copy", f"s:{BUCKET}/run", str(tmp_path / "run"))
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert found == stored
    rclone(server, "check", "--download", f"s:{BUCKET}/run", str(tmp_path / "run"))


def test_boto3_reads_it(server: S3Server, stored: dict[str, str], tmp_path: Path) -> None:
    script = """
for item in s3.list_objects_v2(Bucket=BUCKET, Prefix='run/')['Contents']:
    head = s3.head_object(Bucket=BUCKET, Key=item['Key'], ChecksumMode='ENABLED')
    s3.download_file(BUCKET, item['Key'], sys.argv[1] + '/' + item['Key'].rpartition('/')[2])
    print(json.dumps([item['Key'], head.get('ChecksumSHA256', '')]))
"""
    rows = [json.loads(line) for line in boto(server, script, str(tmp_path)).splitlines()]
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in tmp_path.iterdir()} == stored
    assert {base64.b64decode(checksum).hex() for _, checksum in rows} == set(stored.values())


@pytest.mark.parametrize("checksums", ["when_required", "when_supported"])
def test_the_server_understands_other_clients(server: S3Server, tmp_path: Path, checksums: str) -> None:
    """boto3's uploads in parts, with its trailing checksums as by default, and rclone's."""
    (tmp_path / "file").write_bytes(b"0123456789" * 2 * MIB)
    script = "s3.upload_file(sys.argv[1], BUCKET, 'theirs/boto')\n"
    script += "print(s3.head_object(Bucket=BUCKET, Key='theirs/boto')['ContentLength'])"
    said = boto(server, script, str(tmp_path / "file"), AWS_REQUEST_CHECKSUM_CALCULATION=checksums)
    assert int(said) == 20 * MIB
    rclone(
        server,
        "copyto",
        str(tmp_path / "file"),
        f"s:{BUCKET}/theirs/rclone",
        "--s3-upload-cutoff",
        "5M",
        "--s3-no-check-bucket",
    )
    store = S3Objects(BUCKET, S3Access(KEY_ID, KEY, endpoint=server.url))
    for name in ("boto", "rclone"):
        assert store.read(f"theirs/{name}", 20 * MIB) == b"0123456789" * 2 * MIB
    store.close()
