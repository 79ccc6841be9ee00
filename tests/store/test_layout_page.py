"""The page about the layout of the store: a reader who has only it restores a save, by its own commands."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from podwatch.store.keys import RunKeys
from podwatch.store.objects.b2 import B2Access
from podwatch.store.objects.s3 import S3Access
from podwatch.store.restore.restore import StoreOfRun
from tests.store.restore_world import RestoreWorld, in_directory
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.s3server import BUCKET as S3_BUCKET
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server
from tests.support.stored_save import tree

PAGE = Path(__file__).parents[2] / "docs" / "store-layout.md"
BLOCKS = dict(re.findall(r"```sh (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))


def needs(*programs: str) -> None:
    if missing := [name for name in programs if shutil.which(name) is None]:
        pytest.skip(f"{missing[0]} is not installed")


def run(home: Path, environ: Mapping[str, str], *names: str) -> subprocess.CompletedProcess[str]:
    home.mkdir()
    text = "\n".join(BLOCKS[name] for name in names)
    return subprocess.run(
        ["sh", "-c", text], cwd=home, env={**os.environ, "RUN": "run", "HOME": str(home), **environ},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


def restores(world: RestoreWorld, environ: Mapping[str, str], *names: str) -> None:
    world.save(5, 10)
    done = run(world.home / "reader", environ, *names)
    assert done.returncode == 0, done.stderr
    found, wanted = tree(world.home / "reader" / "restored" / "checkpoint"), tree(world.source(10))
    assert {n: v if isinstance(v, str) else (v[0], v[2]) for n, v in found.items()} == {
        n: v if isinstance(v, str) else (v[0], v[2]) for n, v in wanted.items()
    }
    for name, value in wanted.items():
        if not isinstance(value, str):
            assert abs(found[name][1] - value[1]) < 1_000_000, "to the millisecond"
    # Another save, by its name.
    older = {**environ, "save": f"step_5/{world.shelf.put[5].save_id}"}
    done = run(world.home / "again", older, *names)
    assert done.returncode == 0, done.stderr
    model = world.home / "again" / "restored" / "checkpoint" / "model.bin"
    assert model.read_bytes() == (world.source(5) / "model.bin").read_bytes()


def test_from_a_directory(tmp_path: Path) -> None:
    needs("jq")
    world = in_directory(tmp_path)
    restores(world, {"STORE": str(tmp_path / "store")}, "get-directory", "restore")


def test_damage_is_noticed(tmp_path: Path) -> None:
    needs("jq")
    world = in_directory(tmp_path)
    world.save(10)
    world.shelf.damage(10, "piece-00001")
    done = run(tmp_path / "reader", {"STORE": str(tmp_path / "store")}, "get-directory", "restore")
    assert done.returncode != 0
    assert "did NOT match" in done.stderr


def test_from_s3(tmp_path: Path, s3server: S3Server) -> None:
    needs("curl", "jq")
    access = S3Access(S3_KEY_ID, S3_KEY, endpoint=s3server.url)
    world = RestoreWorld(tmp_path, StoreOfRun(f"s3://{S3_BUCKET}", RunKeys("run"), lambda: access))
    environ = {
        "AWS_ACCESS_KEY_ID": S3_KEY_ID, "AWS_SECRET_ACCESS_KEY": S3_KEY, "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": s3server.url, "BUCKET": S3_BUCKET,
    }  # fmt: skip
    try:
        restores(world, environ, "get-s3", "restore")
    finally:
        s3server.admin("clear")


def test_from_b2(tmp_path: Path, b2server: B2Server) -> None:
    needs("curl", "jq")
    access = B2Access(KEY_ID, KEY, b2server.url)
    world = RestoreWorld(tmp_path, StoreOfRun(f"b2://{BUCKET}", RunKeys("run"), lambda: access))
    environ = {
        "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY, "B2_ENVIRONMENT": b2server.url, "BUCKET": BUCKET,
    }  # fmt: skip
    try:
        restores(world, environ, "get-b2", "restore")
    finally:
        b2server.admin("clear")


def test_with_rclone(tmp_path: Path) -> None:
    needs("rclone", "jq")
    world = in_directory(tmp_path)
    world.save(5, 10)
    done = run(tmp_path / "reader", {"REMOTE": str(tmp_path / "store")}, "rclone")
    assert done.returncode == 0, done.stderr
    found, wanted = tree(tmp_path / "reader" / "restored" / "checkpoint"), tree(world.source(10))
    assert {n: v[0] for n, v in found.items()} == {n: v[0] for n, v in wanted.items() if not isinstance(v, str)}
    assert sorted(p.name for p in (tmp_path / "reader" / "restored").iterdir()) == ["checkpoint"]
