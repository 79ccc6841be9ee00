"""Nothing that is not the training's leaves the pod: links in any segment, exchanged directories, hard links to other
users' files, a replaced output directory. The user T owns output_dir and its parent, podwatch is root."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.stores.local import LocalStore
from podwatch.sync.upload.child_job import JobFile, UploadJob
from podwatch.sync.upload.send_parts import Sending, SourceChanged, SourceForeign
from podwatch.system.pinned_directories import PinnedTree, RootReplaced
from podwatch.system.rights import rights_of
from tests.support.other_users import E, T, as_root, enterable, own
from tests.sync.test_send_parts import Heard

SECRET = b"root only"
SIZE = 12_000_000


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """T's output_dir with a checkpoint, and beside it a directory of root's of the same shape."""
    enterable(tmp_path)
    out = tmp_path / "home" / "out"
    for root in (out / "ckpt", tmp_path / "victim"):
        (root / "step_5" / "deep").mkdir(parents=True)
        (root / "step_5" / "deep" / "model.bin").write_bytes(SECRET * (SIZE // len(SECRET)))
    own(tmp_path / "home", T)
    return out


def job(tree: PinnedTree, root: Path, path: str = "deep/model.bin", **changes: object) -> UploadJob:
    found = (root / path).stat()
    file = JobFile(
        part="p", path=path, remote=f"p/{path}", key="run/model.bin", size=found.st_size, mode=0o644,
        mtime_ns=found.st_mtime_ns, inode=found.st_ino, device=found.st_dev,
    )  # fmt: skip
    options: dict[str, object] = {"rights": rights_of(T, T) if os.geteuid() == 0 else None} | changes
    return UploadJob(
        step=5, save_id="s", store="", writer_id="w", part_size=5_000_000, connections=1, lock="",
        roots={"p": str(root)}, files=(file,), pins=tree.pins(), **options,  # type: ignore[arg-type]
    )  # fmt: skip


def send(wanted: UploadJob, tmp_path: Path, progress: Callable[[int], None] = lambda _: None) -> Heard:
    heard = Heard()
    store = LocalStore(tmp_path / "store", writer_id="w")
    try:
        Sending(wanted, store, heard.say, progress).run()
    finally:
        store.close()
    return heard


def test_the_plain_case(out: Path, tmp_path: Path) -> None:
    tree = PinnedTree([out], owner=None)
    assert send(job(tree, out / "ckpt" / "step_5"), tmp_path).count()["object"] == 1


@pytest.mark.parametrize("segment", ["ckpt", "ckpt/step_5", "ckpt/step_5/deep", "ckpt/step_5/deep/model.bin"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_link_in_any_segment(out: Path, tmp_path: Path, segment: str, when: str) -> None:
    """``when``: before the child opens the file, or between its first and its last part (each open names the path)."""
    tree = PinnedTree([out])
    place, victim = out / segment, tmp_path / "victim" / segment.removeprefix("ckpt").lstrip("/")

    def flip(_: int = 0) -> None:
        if not place.is_symlink():
            place.rename(tmp_path / "home" / "moved")
            place.symlink_to(victim)

    if when == "before":
        flip()
        wanted = job(tree, out / "ckpt" / "step_5")  # judged through the link: identity and path agree
        heard = Heard()
        with pytest.raises(SourceChanged, match="link"):
            heard = send(wanted, tmp_path)
        assert heard.said == []
    else:
        with pytest.raises(SourceChanged, match="link"):
            send(job(tree, out / "ckpt" / "step_5"), tmp_path, flip)
    assert not (tmp_path / "store" / "run" / "model.bin").exists()


def test_a_replaced_root_stops_it(out: Path, tmp_path: Path) -> None:
    tree = PinnedTree([out])
    wanted = job(tree, out / "ckpt" / "step_5")
    out.rename(out.with_name("earlier"))
    (out / "ckpt").parent.mkdir()
    (tmp_path / "home" / "earlier" / "ckpt").rename(out / "ckpt")
    with pytest.raises(RootReplaced):
        send(wanted, tmp_path)


@pytest.mark.parametrize("victim", [0, E])
@as_root
def test_a_hard_link_to_a_file_of_another_user(out: Path, tmp_path: Path, victim: int) -> None:
    tree = PinnedTree([out], owner=T)
    secret = tmp_path / "victim" / "step_5" / "deep" / "model.bin"
    own(secret, victim)
    secret.chmod(0o600)
    planted = out / "ckpt" / "step_5" / "deep" / "other.bin"
    os.link(secret, planted)
    with pytest.raises(SourceForeign, match=f"user {T}.*cannot read"):
        send(job(tree, out / "ckpt" / "step_5", "deep/other.bin"), tmp_path)


@as_root
def test_hard_links_of_the_training_are_fine(out: Path, tmp_path: Path) -> None:
    tree = PinnedTree([out], owner=T)
    model = out / "ckpt" / "step_5" / "deep" / "model.bin"
    os.link(model, model.with_name("same.bin"))
    assert send(job(tree, out / "ckpt" / "step_5"), tmp_path).count()["object"] == 1
