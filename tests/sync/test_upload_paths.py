"""Nothing that is not the training's leaves the pod: links in any segment, exchanged directories, hard links to other
users' files, a replaced output directory. The user T owns output_dir and its parent, podwatch is root."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from podwatch.stores.local import LocalStore
from podwatch.sync.upload.child_job import JobFile, UploadJob
from podwatch.sync.upload.file_owners import check_contents, foreign, owners_of
from podwatch.sync.upload.send_parts import Sending, SourceChanged, SourceForeign
from podwatch.sync.upload.start_child import SetForeign, SetVoid
from podwatch.system.pinned_directories import PinnedTree, RootReplaced
from tests.support.other_users import E, T, as_root, enterable, own
from tests.sync.conftest import Run, World, until
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
    options: dict[str, object] = {"owners": (T,)} | changes
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
    planted = out / "ckpt" / "step_5" / "deep" / "other.bin"
    os.link(secret, planted)
    with pytest.raises(SourceForeign, match=f"hard link to a file of user {victim}"):
        send(job(tree, out / "ckpt" / "step_5", "deep/other.bin"), tmp_path)


@as_root
def test_hard_links_of_the_training_are_fine(out: Path, tmp_path: Path) -> None:
    tree = PinnedTree([out], owner=T)
    model = out / "ckpt" / "step_5" / "deep" / "model.bin"
    os.link(model, model.with_name("same.bin"))
    assert send(job(tree, out / "ckpt" / "step_5"), tmp_path).count()["object"] == 1


class Status:
    def __init__(self, uid: int, links: int = 1, mode: int = 0o755) -> None:
        self.st_uid, self.st_nlink, self.st_mode = uid, links, mode


@pytest.mark.parametrize(
    ("file", "directory", "refused"),
    [
        (Status(0), Status(T), False),
        (Status(0, 2), Status(T), True),
        (Status(0, 2), Status(0), False),
        (Status(0, 2), Status(0, mode=0o1777), True),
        (Status(E, 2), Status(T), True),
        (Status(T, 2), Status(0), False),
        (Status(T, 9), Status(E), False),
    ],
)
def test_whose_file_with_several_names_may_leave(file: Status, directory: Status, refused: bool) -> None:
    assert bool(foreign(file, directory, (T,))) is refused  # type: ignore[arg-type]


@as_root
async def test_the_whole_set_is_void_and_not_tried_again(local: World, run: Run, tmp_path: Path) -> None:
    enterable(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    root = local.write_set(5, size=1000)
    os.link(secret, root / "other.bin")
    own(local.directory, T)
    secret.chmod(0o600)
    os.chown(secret, 0, 0)
    local.scan()
    syncer = await run(local)
    await until(lambda: "upload-abandoned" in local.names())
    with pytest.raises(SetVoid, match="hard link"):
        await syncer.sync_now(5)
    (told,) = [e for e in local.events if e.name == "upload-abandoned"]
    assert "hard link to a file of user 0" in told.message
    assert told.severity == "critical"
    assert local.pointer() is None
    assert local.names().count("upload-started") == 1


@as_root
def test_a_set_that_is_held_is_judged_where_the_trainer_wrote_it(local: World, tmp_path: Path) -> None:
    """Our links are in our directory, which says nothing of whose files they are."""
    enterable(tmp_path)
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    root = local.write_set(5, size=1000)
    own(local.output, T)
    local.scan()
    tree = PinnedTree([local.output], owner=T)
    check_contents(tree, local.catalogue.contents(5), owners_of(tree))
    assert owners_of(tree) == (T,), "root's files count only in root's directories"
    os.link(root / "model.bin", tmp_path / "held")
    check_contents(tree, local.catalogue.contents(5), owners_of(tree))
    os.link(secret, root / "other.bin")
    with pytest.raises(SetForeign, match="hard link to a file of user 0"):
        check_contents(tree, local.catalogue.contents(5), owners_of(tree))
