"""What podwatch has stored, read by other people's clients; their requests against the tests' server; and podwatch's
signatures beside botocore's."""

import hashlib
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from podwatch.stores.s3 import S3Store
from podwatch.stores.s3_credentials import S3Credentials
from tests.suites.s3.conftest import aws, tool
from tests.support.put_file import put_file
from tests.support.s3server import BUCKET, KEY, KEY_ID, S3Server

MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(scope="module")
def stored(server: S3Server) -> dict[str, str]:
    """Name -> SHA-1 of two objects of podwatch."""
    store = S3Store(BUCKET, S3Credentials(KEY_ID, KEY, endpoint=server.url), writer_id="w1")
    data = hashlib.sha512(b"x").digest() * (12 * MIB // 64)
    put_file(store, "run/podwatch/step_1/a/large file+ä.bin", io.BytesIO(data), len(data), part_size=5 * MIB)
    store.put_bytes("run/podwatch/latest.json", b"{}")
    store.close()
    return {"large file+ä.bin": hashlib.sha1(data).hexdigest(), "latest.json": hashlib.sha1(b"{}").hexdigest()}


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
    found = {p.name: hashlib.sha1(p.read_bytes()).hexdigest() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert found == stored
    rclone(server, "check", "--download", f"s:{BUCKET}/run", str(tmp_path / "run"))


def test_boto3_reads_it(server: S3Server, stored: dict[str, str], tmp_path: Path) -> None:
    script = """
for item in s3.list_objects_v2(Bucket=BUCKET, Prefix='run/')['Contents']:
    head = s3.head_object(Bucket=BUCKET, Key=item['Key'], ChecksumMode='ENABLED')
    s3.download_file(BUCKET, item['Key'], sys.argv[1] + '/' + item['Key'].rpartition('/')[2])
    print(json.dumps([item['Key'], head['Metadata'], head.get('ChecksumSHA1', '')]))
"""
    rows = [json.loads(line) for line in boto(server, script, str(tmp_path)).splitlines()]
    assert {p.name: hashlib.sha1(p.read_bytes()).hexdigest() for p in tmp_path.iterdir()} == stored
    assert all(row[1] == {"podwatch-writer": "w1"} for row in rows)
    assert any(row[2].endswith("-3") for row in rows), "the composite checksum"


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
    store = S3Store(BUCKET, S3Credentials(KEY_ID, KEY, endpoint=server.url), writer_id="w1")
    for name in ("boto", "rclone"):
        assert store.get_bytes(f"theirs/{name}") == b"0123456789" * 2 * MIB
        seen = store.stat(f"theirs/{name}")
        assert seen is not None
        assert not seen.ours


def test_signatures_are_botocores(tmp_path: Path) -> None:
    """Both sign the same requests, with the oddest names that a checkpoint can have."""
    keys = ["a", "a b+c", "ä/ß/日本", "x~y_z-.(1)'*!", "a=b&c?d#e%25", "@:;,$", "é", "tab\tname", "trailing "]
    queries: list[dict[str, str]] = [
        {},
        {"prefix": "a/b c+ä", "list-type": "2"},
        {"uploads": ""},
        {"versionId": "a=/+"},
    ]
    script = tmp_path / "sign.py"
    script.write_text(
        "import json, sys\n"
        "from botocore.auth import S3SigV4Auth\n"
        "from botocore.awsrequest import AWSRequest\n"
        "from botocore.credentials import Credentials\n"
        "from podwatch.stores.s3_sign import quoted_path, quoted_query, signed\n"
        "import datetime, time\n"
        "for key, query in json.load(sys.stdin):\n"
        "    path, text = quoted_path('b', key), quoted_query(query.items())\n"
        "    url = 'http://h.example:9000' + path + ('?' + text if text else '')\n"
        "    sent = {'x-amz-meta-podwatch-writer': 'w  1', 'Content-MD5': 'q==', 'Range': 'bytes=0-1'}\n"
        "    theirs = AWSRequest('PUT', url, headers=sent, data=b'')\n"
        "    theirs.context['payload_signing_enabled'] = True\n"
        "    S3SigV4Auth(Credentials('AK', 'SK', 'TOKEN'), 's3', 'eu-x-1').add_auth(theirs)\n"
        "    stamp = theirs.headers['X-Amz-Date']\n"
        "    at = datetime.datetime.strptime(stamp, '%Y%m%dT%H%M%SZ')\n"
        "    wall = at.replace(tzinfo=datetime.timezone.utc).timestamp()\n"
        "    ours = signed('PUT', path, text, {'Host': 'h.example:9000', **sent}, wall=wall, access_key='AK',\n"
        "        secret='SK', payload=theirs.headers['X-Amz-Content-SHA256'], token='TOKEN', region='eu-x-1')\n"
        "    assert ours['Authorization'] == theirs.headers['Authorization'], (key, query)\n"
        "    print('same')\n"
    )
    pairs = [(key, query) for key in keys for query in queries]
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [tool("python"), script], input=json.dumps(pairs), env=aws("") | {"PYTHONPATH": str(source)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("same") == len(pairs)
