"""What podwatch says of the store and of runs in it: which checkpoint is stored, whether a run is down."""

import http.server
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import published, running, status, wait_reason
from tests.support.b2server import BUCKET, KEY_ID, B2Server
from tests.support.rig import Rig

KEYS = {"AWS_ACCESS_KEY_ID": "AKTESTKEY0001", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def podwatch(
    tmp_path: Path, *arguments: str, seconds: float = 240, **environ: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "podwatch", *arguments], capture_output=True, text=True, timeout=seconds, check=False,
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environ},
    )  # fmt: skip


class EndlessPages(http.server.BaseHTTPRequestHandler):
    """Each page of the list of objects has one object and names the next page."""

    protocol_version = "HTTP/1.1"
    pages = itertools.count()

    def do_GET(self) -> None:
        number = next(self.pages)
        key = f"run{number:09d}/podwatch/heartbeat.json"
        body = PAGE.format(number=number, key=key, space=SPACE).encode() if "prefix=" in self.path else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


SPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
PAGE = """<?xml version="1.0"?><ListBucketResult xmlns="{space}"><Name>test-bucket</Name><IsTruncated>true</IsTruncated>
<NextContinuationToken>t{number}</NextContinuationToken><NextKeyMarker>{key}</NextKeyMarker>
<NextVersionIdMarker>t{number}</NextVersionIdMarker><Contents><Key>{key}</Key>
<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag><Size>3</Size>
</Contents></ListBucketResult>"""


@pytest.fixture
def endless() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), EndlessPages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.slow
def test_a_list_that_never_ends_does_not_hang_a_check_of_runs(tmp_path: Path, endless: str) -> None:
    """It says that the store cannot be read: a cron job that hangs tells nobody."""
    environ = {**KEYS, "AWS_ENDPOINT_URL_S3": endless, "AWS_EC2_METADATA_DISABLED": "true"}
    done = podwatch(tmp_path, "runs", "check", "--store", "s3://test-bucket", "--json", seconds=60, **environ)
    assert done.returncode == 3, done.stdout + done.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[B2Server]:
    with B2Server(tmp_path / "b2") as running_server:
        yield running_server


def newest_stored(document: dict[str, Any]) -> int | None:
    step: int | None = document["sync"]["last_step"]
    return step


@pytest.mark.slow
def test_what_is_stored_is_what_this_store_has(rig: Rig, elsewhere: Path) -> None:
    """The store was changed, and nothing can be uploaded to the new one: files are where its directories would be."""
    daemon = rig.daemon(sync__store=f"file://{elsewhere}/old").start()
    running(daemon, rig, step=5)
    published(daemon)
    assert daemon.command("stop-training").returncode == 0
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "stopped", 60, "stopped")
    daemon.stop()
    documents = elsewhere / "new" / rig.run_id / "podwatch"
    documents.mkdir(parents=True)
    for step in rig.saved:
        (documents / f"step_{step}").touch()
    other = rig.daemon(sync__store=f"file://{elsewhere}/new")
    seen = len(other.events())
    other.start()
    other.wait_event("sync-failed", 60, after=seen)
    found = [newest_stored(status(other)) for _ in range(10)]
    assert set(found) == {None}
    assert json.loads(other.command("checkpoints", "--json").stdout)["remote"] == []


@pytest.mark.slow
def test_a_corrected_key_is_used_when_the_operator_asks_for_a_backup(rig: Rig, server: B2Server) -> None:
    """Asked for, and not only at the next try."""
    environ = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": "wrong", "B2_ENVIRONMENT": server.url}
    daemon = rig.daemon(environ, sync__store=f"b2://{BUCKET}", sync__refusal_wait="900s").start("--fresh")
    running(daemon, rig, step=5)
    wait_reason(daemon, "store-unavailable", 60)
    server.add_key(KEY_ID, "wrong")
    done = daemon.command("sync", "--wait", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert newest_stored(status(daemon)) is not None


@pytest.mark.slow
def test_a_run_that_ended_can_be_archived(rig: Rig, elsewhere: Path) -> None:
    """Nothing trains, and podwatch has left: its last heartbeat says so. Seen today: it counts as alive for 15 min."""
    daemon = rig.daemon(sync__store=f"file://{elsewhere}").start()
    running(daemon, rig, step=5)
    published(daemon)
    rig.order(finish=True)
    daemon.wait_for(lambda: status(daemon)["training"]["state"] == "finished", 60, "finished")
    last = rig.saved[-1]
    published(daemon, 60, step=last)
    assert daemon.stop() == 0
    done = daemon.command("runs", "archive", rig.run_id, "--yes")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_while_a_claim_settles_a_backup_that_is_waited_for_says_for_how_long(rig: Rig, elsewhere: Path) -> None:
    daemon = rig.daemon(sync__store=f"file://{elsewhere}", sync__claim_wait="40s").start("--fresh")
    daemon.wait_for(lambda: status(daemon)["checkpoints"]["newest_complete_step"] is not None, 40, "a checkpoint")
    assert status(daemon)["sync"]["settles_in_seconds"] <= 40
    done = daemon.command("sync", "--wait", timeout=200)
    assert done.returncode == 0, done.stderr
    assert re.search(r"claim of the run is decided in \d+ s, nothing is published before", done.stderr), done
    assert newest_stored(status(daemon)) is not None
    assert status(daemon)["sync"]["settles_in_seconds"] is None
