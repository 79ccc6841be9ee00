"""What podwatch reads as root is what it may show to the user who named it: links, hard links, FIFOs, devices."""

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.system import files
from podwatch.system.files import open_file, opened, read_file
from tests.support.other_users import E, T, as_root, enterable, exchanging, own


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A directory of T's, with a log."""
    enterable(tmp_path)
    logs = tmp_path / "home" / "logs"
    logs.mkdir(parents=True)
    (logs / "trainer.log").write_text("step 5\n")
    own(tmp_path / "home", T)
    (tmp_path / "roots").mkdir(mode=0o700)
    (tmp_path / "roots" / "secret").write_text("secret")
    return logs


def link(place: Path, target: object, uid: int) -> Path:
    place.symlink_to(str(target))
    os.chown(place, uid, uid, follow_symlinks=False)
    return place


def refused(path: Path) -> str:
    with pytest.raises(OSError) as caught:
        os.close(open_file(path, shown=True))
    assert caught.value.errno in (errno.EACCES, errno.EINVAL)
    return str(caught.value.strerror)


def test_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("abc")
    assert read_file(tmp_path / "x") == b"abc"
    assert read_file(f"{tmp_path}//./x") == b"abc"
    with opened(tmp_path / "x") as file:
        assert file.read(2) == b"ab"
    monkeypatch.chdir(tmp_path)
    assert read_file("x") == b"abc"
    with pytest.raises(OSError, match="larger"):
        read_file(tmp_path / "x", 2)
    with pytest.raises(NotADirectoryError):
        read_file(tmp_path / "x" / "y")
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    for nothing in (tmp_path, Path("/"), Path("/dev/null")):
        assert refused(nothing) == "not a regular file"


def test_a_fifo_blocks_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trainer.log")
    assert refused(tmp_path / "trainer.log") == "not a regular file"
    with pytest.raises(OSError, match="No such device"):
        os.open(tmp_path / "trainer.log", os.O_WRONLY | os.O_NONBLOCK)  # nor was it opened


@as_root
def test_the_links_of_a_user_lead_only_to_what_is_his(logs: Path) -> None:
    secret = logs.parents[1] / "roots" / "secret"
    for n, target in enumerate((secret, os.path.relpath(secret, logs), "/etc/shadow", "/etc/passwd")):
        assert "symbolic link" in refused(link(logs / f"link{n}", target, T))
    assert "symbolic link" in refused(link(logs / "dir", secret.parent, T) / "secret")
    assert "symbolic link" in refused(link(logs / "way", "dir", T) / "secret")
    assert read_file(link(logs / "fine", "trainer.log", T)) == b"step 5\n"
    assert read_file(link(logs / "chain", "fine", T)) == b"step 5\n"
    assert read_file(link(logs.parent / "dir", "logs", T) / "trainer.log") == b"step 5\n"
    other = logs / "of-e"
    other.write_text("E's")
    own(other, E)
    assert "symbolic link" in refused(link(logs / "to-e", other, T))
    assert "symbolic link" in refused(link(logs / "e-to-t", "trainer.log", E)), "a link of E's in T's directory"


@as_root
def test_a_link_of_roots_counts_only_where_nobody_else_can_put_it(logs: Path) -> None:
    secret = logs.parents[1] / "roots" / "secret"
    mine = link(logs.parents[1] / "link", secret, 0)
    assert read_file(mine) == b"secret"
    mine.rename(logs / "moved")  # as T can, in T's directories
    assert "symbolic link" in refused(logs / "moved")
    open_to_all = logs.parents[1] / "open"
    open_to_all.mkdir()
    link(open_to_all / "link", secret, 0)
    open_to_all.chmod(0o777)
    assert "symbolic link" in refused(open_to_all / "link")
    open_to_all.chmod(0o1777)
    assert read_file(open_to_all / "link") == b"secret"


@as_root
def test_hard_links(logs: Path) -> None:
    roots = logs.parents[1] / "roots"
    os.link(roots / "secret", logs / "trainer.log.1")
    assert "hard link" in refused(logs / "trainer.log.1")
    assert read_file(roots / "secret") == b"secret", "in root's own directory it is still root's"
    assert read_file(logs / "trainer.log.1") == b"secret", "a checkpoint is judged with it"
    assert read_file(roots / "secret", shown=True) == b"secret"
    os.link(logs / "trainer.log", logs / "same")
    assert read_file(logs / "same", shown=True) == b"step 5\n"
    (logs / "of-root").write_text("written by root")
    assert read_file(logs / "of-root") == b"written by root", "one name: it was made here"
    roots.chmod(0o777)
    assert "hard link" in refused(roots / "secret")


def test_a_loop_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError) as caught:
        open_file(tmp_path / "a")
    assert caught.value.errno == errno.ELOOP


def test_exchanged_between_the_look_and_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").write_text("x")
    real = files._open_same

    def flip(directory: int, name: str, judged: os.stat_result, path: str) -> int:
        (tmp_path / "log").unlink()
        os.mkfifo(tmp_path / "log")
        return real(directory, name, judged, path)

    monkeypatch.setattr(files, "_open_same", flip)
    with pytest.raises(FileNotFoundError, match="replaced"):
        open_file(tmp_path / "log")


@as_root
def test_a_race_for_a_log(logs: Path) -> None:
    """T exchanges the log and a link to a file of root's in a loop in C: it is read whole or not at all."""
    other = link(logs / "link", logs.parents[1] / "roots" / "secret", T)
    seen = set()
    with exchanging(T, logs / "trainer.log", other):
        for _ in range(3000):
            try:
                seen.add(read_file(logs / "trainer.log"))
            except OSError as error:
                seen.add(error.strerror)
    assert b"secret" not in seen
    assert b"step 5\n" in seen


@given(st.lists(st.sampled_from(["d", "file", "in", "out", "..", ".", "", "loop"]), min_size=1, max_size=6))
def test_it_resolves_as_the_kernel_does(names: list[str]) -> None:
    """Where nobody else owns anything, the rule refuses nothing that can be opened."""
    root = _sample()
    path = "/".join([root, *names])
    try:
        fd = os.open(path, os.O_RDONLY)
        expected = os.fstat(fd).st_ino if Path(path).is_file() and not path.endswith(("/", "/.")) else None
        os.close(fd)
    except OSError:
        expected = None
    if expected is not None:
        fd = open_file(path)
        assert os.fstat(fd).st_ino == expected
        os.close(fd)
    elif not path.endswith(("/", "/.")):  # POSIX wants a directory there; nobody configures such a path
        with pytest.raises(OSError):
            open_file(path)


_made: list[str] = []
_once = threading.Lock()


def _sample() -> str:
    import tempfile

    with _once:
        if not _made:
            root = Path(tempfile.mkdtemp())
            (root / "d" / "d").mkdir(parents=True)
            for place in (root, root / "d", root / "d" / "d"):
                (place / "file").write_text(str(place))
                (place / "in").symlink_to("file")
                (place / "out").symlink_to(f"{root}/d")
                (place / "loop").symlink_to("loop")
            _made.append(str(root))
    return _made[0]


def test_no_descriptor_is_left_open(logs: Path) -> None:
    (logs / "to").symlink_to(logs / "trainer.log")
    (logs / "loop").symlink_to("loop")
    os.mkfifo(logs / "fifo")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        for name in ("trainer.log", "to", "loop", "fifo", "none", "trainer.log/x", ""):
            try:
                os.close(open_file(logs / name))
            except OSError:
                continue
    assert len(list(Path("/proc/self/fd").iterdir())) == before
