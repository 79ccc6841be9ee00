"""Buckets of a run as whoever has the key sees them: objects by name, in a directory or in the B2 stand-in's data.

Two checkpoints of a run are stored as podwatch stores them. A test then changes them as a thief of the key, a broken
disk or another tool would; ``forge`` leaves a pointer that fits the forged manifest, so that only the content is wrong.
"""

import base64
import contextlib
import hashlib
import json
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.checkpoints import write_prime_rl_step
from tests.support.daemon import DaemonProcess
from tests.support.plain_save import objects_of
from tests.support.rig import Rig

EARLIER, NEWEST = 4, 8
"""The steps of the two checkpoints that ``published`` leaves."""

Change = Callable[[dict[str, Any]], None]


class Bucket:
    """Objects of one run; ``url`` and ``environ`` are for podwatch."""

    url: str
    environ: dict[str, str]

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.root = f"{run_id}/podwatch"
        self.latest = f"{self.root}/latest.json"

    def names(self) -> list[str]:
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        raise NotImplementedError

    def write(self, name: str, data: bytes) -> str:
        """The id of the new version, empty where a store has no versions."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        raise NotImplementedError

    def document(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.read(name))
        return found

    def manifest_name(self, step: int) -> str:
        (name,) = [n for n in self.names() if n.startswith(f"{self.root}/step_{step}/") and n.endswith("manifest.json")]
        return name

    def pieces(self, step: int) -> list[str]:
        """Objects of a checkpoint's files that have content."""
        folder = self.manifest_name(step).removesuffix("manifest.json")
        documents = {f"{folder}{name}.json" for name in ("intent", "manifest", "exports")}
        return [n for n in self.names() if n.startswith(folder) and n not in documents and self.read(n)]

    def forge(self, change: Change, step: int = NEWEST) -> None:
        """``change`` edits the manifest of the step in place."""
        document = self.document(self.manifest_name(step))
        change(document)
        self.forge_raw(json.dumps(document, indent=1, sort_keys=True).encode(), step)

    def forge_raw(self, data: bytes, step: int = NEWEST) -> None:
        """``data`` as the manifest of the step; the newest pointer, if it names the step, fits."""
        self.write(self.manifest_name(step), data)
        if self.document(self.pointer)["step"] == step:
            self.point(manifest_hash=f"sha256:{hashlib.sha256(data).hexdigest()}", manifest_size=len(data))

    @property
    def pointer(self) -> str:
        """The name of the newest one."""
        return max(name for name in self.names() if name.startswith(f"{self.root}/pointers/"))

    def point(self, **changes: Any) -> None:
        """A newer pointer, like the last one but for this."""
        document = self.document(self.pointer)
        document["seq"] += 1
        name = f"{self.root}/pointers/{document['generation']:012}-{document['seq']:012}-forged.json"
        self.write(name, json.dumps(document | changes).encode())
        self.write(self.latest, json.dumps(document | changes).encode())

    def point_raw(self, data: bytes) -> None:
        """``data`` in the place of the newest pointer."""
        self.write(self.pointer, data)
        self.write(self.latest, data)


class DirectoryBucket(Bucket):
    def __init__(self, directory: Path, run_id: str) -> None:
        super().__init__(run_id)
        self.directory, self.url, self.environ = directory, f"file://{directory}", {}

    def names(self) -> list[str]:
        found = [p for p in (self.directory / self.run_id).rglob("*") if p.is_file()]
        return sorted(str(p.relative_to(self.directory)) for p in found)

    def read(self, name: str) -> bytes:
        return (self.directory / name).read_bytes()

    def write(self, name: str, data: bytes) -> str:
        (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        (self.directory / name).write_bytes(data)
        return ""

    def remove(self, name: str) -> None:
        (self.directory / name).unlink()


class B2Bucket(Bucket):
    """The data of a B2 stand-in that does not run; ``serving`` starts one on it."""

    def __init__(self, directory: Path, run_id: str) -> None:
        super().__init__(run_id)
        self.directory = directory

    @contextlib.contextmanager
    def serving(self) -> Iterator[B2Server]:
        with B2Server(self.directory) as server:
            self.url, self.environ = f"b2://{server.bucket}", server.environment()
            yield server

    def _versions(self) -> dict[str, dict[str, Any]]:
        """The newest version of each name."""
        found = [json.loads(path.read_text()) for path in (self.directory / "meta").glob("*.json")]
        return {version["name"]: version for version in sorted(found, key=lambda version: int(version["number"]))}

    def names(self) -> list[str]:
        return sorted(self._versions())

    def read(self, name: str) -> bytes:
        return (self.directory / "body" / self._versions()[name]["file_id"]).read_bytes()

    def write(self, name: str, data: bytes) -> str:
        versions = self._versions()
        like = versions.get(name) or next(iter(versions.values()))
        number = max(int(version["number"]) for version in versions.values()) + 1
        file_id = f"{like['file_id'].rpartition('_f')[0]}_f{number:016x}_n{number}"
        made = like | {
            "file_id": file_id, "name": name, "number": number, "size": len(data),
            "sha1": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
        }  # fmt: skip
        (self.directory / "body" / file_id).write_bytes(data)
        (self.directory / "meta" / f"{file_id}.json").write_text(json.dumps(made))
        return file_id

    def remove(self, name: str) -> None:
        for path in (self.directory / "meta").glob("*.json"):
            version = json.loads(path.read_text())
            if version["name"] == name:
                path.unlink()
                (self.directory / "body" / version["file_id"]).unlink()


def fill(place: Path, run_id: str, put: Callable[[str, bytes], object]) -> None:
    """Two checkpoints, each named by a pointer."""
    for seq, step in enumerate((EARLIER, NEWEST), 1):
        write_prime_rl_step(place, step, "B")
        folder = place / "checkpoints" / f"step_{step}"
        parts = {part: folder / part for part in ("trainer", "orchestrator")}
        for name, data in objects_of(run_id, "prime-rl", step, seq, parts).items():
            put(name, data)


@contextlib.contextmanager
def published_directory(root: Path) -> Iterator[DirectoryBucket]:
    made = DirectoryBucket(root / "bucket", "run")
    fill(root / "pod", made.run_id, made.write)
    yield made


def published_b2(root: Path) -> B2Bucket:
    made = B2Bucket(root / "bucket", "run")
    with made.serving() as server:
        fill(root / "pod", made.run_id, B2Uploads(server.url).put)
    return made


class B2Uploads:
    """A client of the stand-in that can only upload."""

    def __init__(self, url: str) -> None:
        key = base64.b64encode(f"{KEY_ID}:{KEY}".encode()).decode()
        account = self._ask(f"{url}/b2api/v3/b2_authorize_account", {"Authorization": f"Basic {key}"})
        self._api = account["apiInfo"]["storageApi"]
        self._token = {"Authorization": account["authorizationToken"]}
        body = json.dumps({"accountId": account["accountId"], "bucketName": BUCKET}).encode()
        listed = self._ask(f"{self._api['apiUrl']}/b2api/v3/b2_list_buckets", self._token, body)
        self._bucket = listed["buckets"][0]["bucketId"]

    def put(self, name: str, data: bytes) -> None:
        body = json.dumps({"bucketId": self._bucket}).encode()
        place = self._ask(f"{self._api['apiUrl']}/b2api/v3/b2_get_upload_url", self._token, body)
        headers = {
            "Authorization": place["authorizationToken"], "X-Bz-File-Name": quote(name), "Content-Type": "b2/x-auto",
            "X-Bz-Content-Sha1": hashlib.sha1(data, usedforsecurity=False).hexdigest(),
        }  # fmt: skip
        self._ask(place["uploadUrl"], headers, data)

    def _ask(self, url: str, headers: dict[str, str], body: bytes | None = None) -> dict[str, Any]:
        asked = urllib.request.Request(url, data=body, headers=headers)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def publish(rig: Rig, environ: dict[str, str], url: str, stored: Callable[[], list[str]]) -> None:
    """A real job trains to ``NEWEST`` and ends once both checkpoints are stored."""
    rig.trainer_flags = ["--max-steps", str(NEWEST), "--ckpt.interval", str(EARLIER)]
    rig.order(wait=True, at=EARLIER + 1)
    daemon = rig.daemon(environ, sync__store=url).start("--job")
    daemon.wait_for(
        lambda: any(name.endswith("latest.json") for name in stored()), 60, "the earlier checkpoint is published"
    )
    rig.obey()
    assert daemon.process is not None
    assert daemon.process.wait(180) == 0, daemon.tail()


@contextlib.contextmanager
def directory_of_a_job(root: Path, nvml: Path) -> Iterator[DirectoryBucket]:
    """On another file system than the checkpoints, as podwatch asks."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    rig = Rig(root / "pod", nvml)
    try:
        made = DirectoryBucket(directory, rig.run_id)
        publish(rig, {}, made.url, made.names)
        rig.close()
        yield made
    finally:
        shutil.rmtree(directory)


def b2_of_a_job(root: Path, nvml: Path) -> B2Bucket:
    rig = Rig(root / "pod", nvml)
    made = B2Bucket(root / "bucket", rig.run_id)
    with made.serving() as server:
        publish(rig, made.environ, made.url, lambda: [version["name"] for version in server.versions()])
    rig.close()
    return made


def copied(bucket: Bucket, to: Path) -> Bucket:
    """The same bucket for one test."""
    assert isinstance(bucket, DirectoryBucket | B2Bucket)
    shutil.copytree(bucket.directory, to)
    return type(bucket)(to, bucket.run_id)


class BarePod:
    """A pod without podwatch running, and all that lies around its directories."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self.root, self.bucket = root, bucket
        self.output, self.target = root / "a/b/c/out", root / "a/b/c/to"
        self.target.parent.mkdir(parents=True)
        self.outside = root / "outside"
        self.outside.mkdir()
        (self.outside / "victim").write_text("as it was")
        config = f"""
run_id = "{bucket.run_id}"
state_dir = "{root}/own/state"
[trainer]
layout = "prime-rl"
output_dir = "{self.output}"
command = ["true"]
[sync]
store = "{bucket.url}"
"""
        self.podwatch = DaemonProcess(root / "own", config, bucket.environ)

    def around(self) -> dict[str, str]:
        """Everything outside of the target and of podwatch's own directories."""
        beside = self.output.parent / ".podwatch"
        mine = [self.output, self.target, beside, self.root / "own", self.root / "bucket"]
        found = [p for p in self.root.rglob("*") if not any(p.is_relative_to(one) for one in mine)]
        return {str(p): "" if p.is_dir() else str(p.readlink()) if p.is_symlink() else p.read_text() for p in found}

    def refuses(self, step: int = NEWEST) -> str:
        """``restore --step`` writes nothing and says why with one error; that."""
        before = self.around()
        done = self.podwatch.command("restore", "--step", str(step), "--to", str(self.target))
        assert done.returncode == 69, (done.returncode, done.stdout, done.stderr)
        assert (done.stderr.count("\n"), done.stderr.startswith("podwatch: ")) == (1, True), done.stderr
        assert len(done.stderr) < 2000, "the bucket's text is cut short"
        assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in done.stderr.rstrip()), "it plays with no terminal"
        assert self.around() == before
        assert not [p for p in self.target.rglob("*") if p.is_file() or p.is_symlink()], "nothing of it was placed"
        return done.stderr

    def falls_back(self) -> dict[str, Any]:
        """``restore`` in place brings the earlier checkpoint, whole; its report."""
        before = self.around()
        done = self.podwatch.command("restore", "--json")
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        assert report["step"] == EARLIER
        assert self.around() == before
        assert self.files() == {f"checkpoints/step_{EARLIER}/trainer/{n}" for n in (".metadata", "__0_0.distcp")}
        assert report["refused"], "it says what it passed over"
        return report

    def files(self) -> set[str]:
        """Files of the trainer's part, whatever the step."""
        found = self.output.glob("checkpoints/*/trainer/*")
        return {str(p.relative_to(self.output)) for p in found}
