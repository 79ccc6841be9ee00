"""The directory store's own promises: links, foreign files, what a killed writer leaves."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podwatch.domain.errors import RemoteError
from podwatch.stores.base import StoredObject
from podwatch.stores.local import PRIVATE, LocalStore
from podwatch.stores.part_reader import FileSource
from tests.support.put_file import put_file
from tests.support.strangers import needs_root


def test_symlinks_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "store"
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    store = LocalStore(root, writer_id="w")
    with pytest.raises(RemoteError):
        store.put_bytes("link/x", b"1")
    assert list(outside.iterdir()) == [outside / "secret"]
    for key in ("link/secret", "file"):
        try:
            assert store.get_bytes(key) is None
        except RemoteError:
            pass
    store.put_bytes("file", b"replaces the link, not its target")
    assert (outside / "secret").read_bytes() == b"secret"
    assert [o.key for o in LocalStore(root, writer_id="w").list("")] == ["file"]


@pytest.mark.parametrize(
    ("mode", "stored"), [(0o600, 0o600), (0o644, 0o644), (0o400, 0o600), (0o640, 0o640), (0o666, 0o644)]
)
def test_a_file_becomes_readable_for_nobody_else(tmp_path: Path, mode: int, stored: int) -> None:
    """Small, and in parts; nor while it is sent."""
    path = tmp_path / "weights"
    path.write_bytes(b"12345678")
    path.chmod(mode)
    store = LocalStore(tmp_path / "store", writer_id="w")
    with path.open("rb") as file:
        source = FileSource(file.fileno())
        store.put_small("small", source, 8)
        upload = store.begin_large("large", 8)
        (data,) = (tmp_path / "store").rglob("data")
        assert data.stat().st_mode & 0o077 == 0
        parts = [store.put_part(upload, number, source, offset, 4) for number, offset in ((1, 0), (2, 4))]
        assert data.stat().st_mode & 0o777 == stored
        store.finish_large(upload, parts, 8)
    for name in ("small", "large"):
        assert (tmp_path / "store" / name).stat().st_mode & 0o777 == stored
        assert store.get_bytes(name) == b"12345678"
    store.put_bytes("document", b"{}")
    assert (tmp_path / "store" / "document").stat().st_mode & 0o777 == 0o644


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, writer_id="w")
    (tmp_path / "theirs").write_bytes(b"x")
    mine = store.put_bytes("mine", b"12")
    with pytest.raises(RemoteError, match="mark"):
        store.delete(StoredObject("theirs", 1, ours=True))
    assert (tmp_path / "theirs").exists()
    (tmp_path / "mine").write_bytes(b"34")  # someone writes over ours, same size
    os.utime(tmp_path / "mine", ns=(1, 1))
    seen = store.stat("mine")
    assert seen is not None
    assert not seen.ours
    with pytest.raises(RemoteError, match="mark"):
        store.delete(mine)


def test_a_copied_store_is_still_ours(tmp_path: Path) -> None:
    LocalStore(tmp_path / "a", writer_id="w").put_bytes("x/y", b"1")
    subprocess.run(["cp", "-a", str(tmp_path / "a"), str(tmp_path / "b")], check=True)
    seen = LocalStore(tmp_path / "b", writer_id="other").stat("x/y")
    assert seen is not None
    assert (seen.ours, seen.writer_id) == (True, "w")


def test_replaced_version_is_not_deleted(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, writer_id="w")
    old = store.put_bytes("k", b"1")
    store.put_bytes("k", b"22")
    store.delete(old)
    assert store.get_bytes("k") == b"22"


WRITER = """
import io, sys, time
from pathlib import Path
from podwatch.stores.local import LocalStore
from tests.support.put_file import put_file
from tests.support.strangers import needs_root
class Slow(io.BytesIO):
    def read(self, n=-1):
        data = super().read(n)
        print("reading", flush=True)
        time.sleep(60)
        return data
put_file(LocalStore(Path(sys.argv[1]), writer_id="w"), "run/f", Slow(b"x" * 100), 100, part_size=100)
"""


def test_a_killed_writer_leaves_nothing_visible_and_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        left = list((tmp_path / PRIVATE / "tmp").iterdir())
        assert len(left) == 1
        LocalStore(tmp_path, writer_id="w").put_bytes("other", b"1")
        assert left[0].exists(), "a living writer's file must not be swept"
        process.send_signal(signal.SIGKILL)
    store = LocalStore(tmp_path, writer_id="w")
    assert store.stat("run/f") is None
    store.put_bytes("other", b"2")
    assert list((tmp_path / PRIVATE / "tmp").iterdir()) == []


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    store = LocalStore(tmp_path, writer_id="w")
    with pytest.raises(RemoteError, match="Input/output error"):
        put_file(store, "f", Broken(b"x"), 1, part_size=50)
    assert list((tmp_path / PRIVATE / "tmp").iterdir()) == []
    assert store.stat("f") is None


def test_a_root_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteError) as caught:
        LocalStore(tmp_path / "file" / "store", writer_id="w").check()
    assert "directory" in str(caught.value)


def test_time_is_recorded(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, writer_id="w", wall=lambda: 1234.5)
    assert store.put_bytes("a", b"").uploaded_wall == 1234.5
    seen = store.stat("a")
    assert seen is not None
    assert seen.uploaded_wall == 1234.5
    assert time.time() > 1234.5


def test_a_root_that_was_deleted_is_an_error_and_is_not_made_again(tmp_path: Path) -> None:
    """What was stored is gone with it: a store that is made again unnoticed would pass for a backup."""
    store = LocalStore(tmp_path / "store", writer_id="w")
    assert store.get_bytes("a") is None, "before the first write it need not exist"
    store.put_bytes("a", b"1")
    (tmp_path / "store").rename(tmp_path / "gone")
    uses = (lambda: store.put_bytes("b", b"2"), lambda: store.get_bytes("a"), lambda: list(store.list("")), store.check)
    for operation in uses:
        with pytest.raises(RemoteError, match="its directory is gone") as caught:
            operation()
        assert caught.value.transient
    assert not (tmp_path / "store").exists()
    (tmp_path / "gone").rename(tmp_path / "store")
    assert store.get_bytes("a") == b"1"


MOUNTED = """
import os, subprocess, sys
from pathlib import Path
from podwatch.domain.errors import RemoteError
from podwatch.stores.local import LocalStore
root = Path(sys.argv[1])
mount = ["mount", "-t", "tmpfs", "none", str(root)]
subprocess.run(mount, check=True)
(root / "sub").mkdir()
for store in (LocalStore(root, writer_id="w"), LocalStore(root / "sub", writer_id="w")):
    store.put_bytes("a", b"1")
    subprocess.run(["umount", str(root)], check=True)
    store.root.mkdir(exist_ok=True)
    try:
        store.put_bytes("b", b"2")
    except RemoteError as error:
        print(error.what)
    print(sorted(os.listdir(store.root)))
    subprocess.run(mount, check=True)
    (root / "sub").mkdir()
    store.put_bytes("c", b"3")
    print(sorted(item.key for item in store.list("")))
"""


@needs_root
def test_a_root_that_is_not_mounted_any_more_takes_nothing(tmp_path: Path) -> None:
    """It would be written to the disk below, which is not another one. Mounted again, it is used again."""
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", MOUNTED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    why = "the store cannot be used: its file system is not mounted any more"
    assert done.stdout.splitlines() == [why, "[]", "['c']"] * 2, done.stderr
