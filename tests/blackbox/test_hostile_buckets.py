"""A bucket that somebody else can write, in a directory and in B2: pointers that lie, pieces that are missing or have
changed places, and what `restore`, `store verify`, `runs restore` and `bootstrap` make of them."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.buckets import (
    EARLIER,
    NEWEST,
    B2Bucket,
    BarePod,
    Bucket,
    b2_of_a_job,
    copied,
    directory_of_a_job,
    published_b2,
    published_directory,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def in_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with published_directory(tmp_path_factory.mktemp("published")) as made:
        yield made


@pytest.fixture(scope="module")
def in_b2(tmp_path_factory: pytest.TempPathFactory) -> Bucket:
    return published_b2(tmp_path_factory.mktemp("published"))


@pytest.fixture(params=["in_directory", "in_b2"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    return copied(request.getfixturevalue(request.param), tmp_path / "bucket")


@pytest.fixture(scope="module")
def job_in_directory(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Iterator[Bucket]:
    with directory_of_a_job(tmp_path_factory.mktemp("published"), nvml_library) as made:
        yield made


@pytest.fixture(scope="module")
def job_in_b2(tmp_path_factory: pytest.TempPathFactory, nvml_library: Path) -> Bucket:
    return b2_of_a_job(tmp_path_factory.mktemp("published"), nvml_library)


@pytest.fixture(params=["job_in_directory", "job_in_b2"])
def of_a_job(request: pytest.FixtureRequest, tmp_path: Path) -> Bucket:
    """With the configuration that a job stores."""
    return copied(request.getfixturevalue(request.param), tmp_path / "bucket")


@contextlib.contextmanager
def pod_of(bucket: Bucket, root: Path) -> Iterator[BarePod]:
    """A pod that has the key, once the bucket is as the test wants it."""
    with bucket.serving() if isinstance(bucket, B2Bucket) else contextlib.nullcontext():
        yield BarePod(root, bucket)


def missing(bucket: Bucket) -> None:
    bucket.remove(bucket.pieces(NEWEST)[-1])


def cut(bucket: Bucket) -> None:
    name = bucket.pieces(NEWEST)[-1]
    bucket.write(name, bucket.read(name)[:-1])


def flipped(bucket: Bucket) -> None:
    """As long as before."""
    name = bucket.pieces(NEWEST)[-1]
    data = bucket.read(name)
    bucket.write(name, bytes([data[0] ^ 1]) + data[1:])


def swapped(bucket: Bucket) -> None:
    """Two objects have changed places."""
    one, other = bucket.pieces(NEWEST)[-2:]
    first, second = bucket.read(one), bucket.read(other)
    bucket.write(one, second)
    bucket.write(other, first)


def without_manifest(bucket: Bucket) -> None:
    bucket.remove(bucket.manifest_name(NEWEST))


@pytest.mark.parametrize("change", [missing, cut, flipped, swapped, without_manifest], ids=lambda one: one.__name__)
def test_objects_that_are_not_those_of_the_manifest(
    bucket: Bucket, tmp_path: Path, change: Callable[[Bucket], None]
) -> None:
    change(bucket)
    with pod_of(bucket, tmp_path) as pod:
        pod.refuses()
        pod.falls_back()
        done = pod.podwatch.command("store", "verify", "--deep", "--json")
        unnamed = change is without_manifest  # what is left of it is an upload that never ended
        assert done.returncode == (0 if unnamed else 1), done.stdout


POINTERS: dict[str, Callable[[Bucket], object]] = {
    "nothing": lambda b: b.point_raw(b""),
    "a list": lambda b: b.point_raw(b"[]"),
    "deep": lambda b: b.point_raw(b"[" * 100_000 + b"]" * 100_000),
    "not UTF-8": lambda b: b.point_raw(b"\xff\xfe"),
    "huge": lambda b: b.point_raw(b'{"x": "' + b"a" * (2 << 20) + b'"}'),
    "a step that is not there": lambda b: b.point(step=10**6),
    "a step of words": lambda b: b.point(step="8"),
    "a manifest of another hash": lambda b: b.point(manifest_hash="sha256:" + "0" * 64),
    "a manifest of another size": lambda b: b.point(manifest_size=1),
    "a way out": lambda b: b.point(save_id="../../../outside"),
    "another run": lambda b: b.point(run_id="another"),
    "a generation beyond all": lambda b: b.point(generation=2**70),
    "a later format": lambda b: b.point(schema_version=1000),
}


@pytest.mark.parametrize("name", POINTERS)
def test_a_pointer_that_lies(bucket: Bucket, tmp_path: Path, name: str) -> None:
    """The checkpoints are whole and are found by their manifests, or nothing is restored; never something else."""
    POINTERS[name](bucket)
    with pod_of(bucket, tmp_path) as pod:
        before = pod.around()
        done = pod.podwatch.command("restore", "--json")
        assert pod.around() == before
        assert "Traceback" not in done.stderr
        assert done.returncode in (0, 69), (done.returncode, done.stderr)
        if done.returncode == 0:
            assert json.loads(done.stdout)["step"] in (EARLIER, NEWEST)
        else:
            assert (done.stderr.count("\n"), pod.files()) == (1, set()), done.stderr


def test_another_directory_can_fetch_a_run_and_a_forged_one_steps_back(bucket: Bucket, tmp_path: Path) -> None:
    """`runs restore` needs no configuration of the run."""
    bucket.forge(lambda document: document["files"][-1].update(path="../../outside/victim"))
    with pod_of(bucket, tmp_path) as pod:
        before = pod.around()
        words = ("runs", "restore", bucket.run_id, "--store", bucket.url, "--json")
        refused = pod.podwatch.command(*words, "--step", str(NEWEST), "--to", str(pod.target))
        assert (refused.returncode, refused.stderr.count("\n")) == (69, 1), refused.stderr
        done = pod.podwatch.command(*words, "--to", str(pod.target))
        assert (done.returncode, json.loads(done.stdout)["step"]) == (0, EARLIER), done.stderr
        assert pod.around() == before
        verified = pod.podwatch.command("store", "verify", "--json")
        assert verified.returncode == 1


@pytest.mark.parametrize("path", ["../../outside/victim", "{outside}/victim", "a\x1b[2Jb", "a\nb"])
def test_bootstrap_without_trust_places_and_starts_nothing(of_a_job: Bucket, tmp_path: Path, path: str) -> None:
    bucket = of_a_job
    name = f"{bucket.root}/config/bootstrap.json"
    record = bucket.document(name)
    assert record["files"]
    outside = tmp_path / "outside"
    for file in record["files"]:
        file["path"] = path.format(outside=outside)
    bucket.write(name, json.dumps(record).encode())
    with pod_of(bucket, tmp_path) as pod:
        before = pod.around()
        done = pod.podwatch.command("bootstrap", bucket.url, bucket.run_id, "--dir", str(pod.target))
        assert done.returncode not in (0, 2), (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert not any(ord(c) < 32 and c != "\n" for c in done.stdout + done.stderr)
        assert pod.around() == before
        assert not [p for p in pod.target.rglob("*") if p.is_symlink() or (p.is_file() and p.stat().st_size)]
