"""Bringing one save's files into staging directories: every byte hashed, every name distrusted, a kill survived.

One queue of pieces (the manifest's parts) over all files. What is already staged is hashed and kept where it is right,
so an interrupted restore loses at most the pieces that were on their way; what a damaged set in place still has right
is copied from there. Runs in a child process (fetch_child.py).
"""

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from podwatch.client.times import size as in_words
from podwatch.domain.errors import HostError, IntegrityError, RemoteError
from podwatch.domain.links import check_links
from podwatch.domain.remote import ManifestFile, ManifestSymlink
from podwatch.stores.base import ObjectStore
from podwatch.sync.errors import SaveGone
from podwatch.sync.fetch_job import Fetched, FetchJob
from podwatch.sync.lanes import Lanes
from podwatch.sync.pace import RateLimit
from podwatch.sync.staged import StagedFile, hash_in_place, link_there, open_there, same_on_disk
from podwatch.sync.staging import allocated, give_away, open_staging, strip
from podwatch.system.files import open_dir_below, sync_filesystem

MARKERS = frozenset(
    {".metadata", "STABLE", "COMPLETED", "trainer_state.json", "latest", "model.safetensors.index.json"}
)
"""Files by which a layout knows a set as whole (facts/checkpoints.md): fetched last."""
HASTE = 2
"""Times the connections that an upload begins with: training waits for a restore, and nothing else needs the line."""
READINGS = 2
"""How often a piece is read before it counts as damaged in the store: a bit may flip on the way, hardly ever twice."""

Progress = Callable[[int, int], None]
"""(bytes that are right or on their way, bytes that came over the line)."""


def is_marker(path: str) -> bool:
    return path.rpartition("/")[2] in MARKERS


class Fetching:
    """``run`` brings everything that is not in place already. Raises IntegrityError (damaged), SaveGone (no longer
    there), RemoteError, HostError (no room) or OSError."""

    def __init__(self, job: FetchJob, store: ObjectStore, progress: Progress) -> None:
        self._job, self._store, self._progress = job, store, progress
        self._limit = RateLimit(job.max_rate, time.monotonic, time.sleep)
        most = max(job.connections, job.connections_max)
        self._lanes = Lanes(min(HASTE * job.connections, most), most)
        self._lock = threading.Lock()
        self._here = 0
        self._downloaded = 0

    def run(self) -> Fetched:
        files = by_part(self._job.files)
        check_links(self._job.files, self._job.symlinks)
        staged = tuple(p for p in self._job.parts if not self._in_place(p, files.get(p, [])))
        for part in set(self._job.parts) - set(staged):
            self._count(sum(f.size for f in files[part]))
        homes = {part: Path(self._job.staging[part]) for part in staged}
        wanted = [f for part in staged for f in files.get(part, [])]
        links = [s for s in self._job.symlinks if s.part in staged]
        roots: dict[Path, int] = {}
        try:
            for home in set(homes.values()):
                roots[home] = open_staging(self._job.pins, home)
                strip(roots[home], {f.path for f in wanted if homes[f.part] == home})
            check_room([(roots[homes[f.part]], f.size) for f in wanted])
            plain = sorted((f for f in wanted if not is_marker(f.path)), key=lambda f: -f.size)
            self._fetch(plain, homes, roots)
            self._fetch([f for f in wanted if is_marker(f.path)], homes, roots)
            for link in links:
                self._link(roots[homes[link.part]], link)
            for descriptor in roots.values():
                give_away(descriptor, self._job.owner)
                sync_filesystem(descriptor)
        finally:
            for descriptor in roots.values():
                os.close(descriptor)
        return Fetched(staged, self._downloaded)

    # -- what is there ------------------------------------------------------------------------------------------------

    def _in_place(self, part: str, files: list[ManifestFile]) -> bool:
        """Does the part lie where it belongs, every byte and mtime? Its links are put there with its last file."""
        target, pins = self._job.targets[part], self._job.pins
        if not files or not all(same_on_disk(pins, target, f) for f in files):
            return False
        if not all(link_there(pins, target, s) for s in self._job.symlinks if s.part == part):
            return False
        wrong: list[str] = []

        def look(file: ManifestFile, number: int) -> None:
            if not wrong and hash_in_place(pins, target, file, self._job.part_size, number) != file.parts_sha1[number]:
                wrong.append(file.path)

        self._lanes.run(
            [lambda f=f, n=n: look(f, n) for f in files for n in range(len(f.parts_sha1))]  # type: ignore[misc]
        )
        return not wrong

    # -- bringing it --------------------------------------------------------------------------------------------------

    def _fetch(self, files: Iterable[ManifestFile], homes: dict[str, Path], roots: dict[Path, int]) -> None:
        work: list[Callable[[], None]] = []
        for file in files:
            seed = partial(open_there, self._job.pins, self._job.targets[file.part], file)
            state = StagedFile(file, roots[homes[file.part]], self._job.part_size, seed)
            work += [lambda s=state, n=n: self._piece(s, n) for n in range(state.left)]  # type: ignore[misc]
        self._lanes.run(work)

    def _piece(self, state: StagedFile, number: int) -> None:
        state.open()
        if state.spans:
            length = state.spans[number][1]
            touched = state.touched(number)
            if (touched and state.good(number)) or (not touched and state.taken_from_seed(number)):
                self._count(length)
            else:
                self._download(state, number, fresh=not touched and not state.seeded)
            state.written(number)
        with state.lock:
            state.left -= 1
            last = state.left == 0
        if last:
            state.complete(self._job.owner)

    def _download(self, state: StagedFile, number: int, *, fresh: bool) -> None:
        file = state.file
        offset, length = state.spans[number]
        for _ in range(READINGS):
            digest = hashlib.sha1(usedforsecurity=False)
            write = state.writer(number, fresh=fresh)
            came = 0

            def take(data: memoryview) -> None:
                nonlocal came
                digest.update(data)  # noqa: B023 - used within this turn of the loop
                write(data)  # noqa: B023
                came += len(data)
                self._lanes.moved(len(data))
                self._count(len(data), downloaded=len(data))
                self._limit.take(len(data))

            size = self._ask(file, offset, length, take)
            if size != file.size:
                raise IntegrityError("object has another size than recorded", where=self._place(file))
            if digest.hexdigest() == file.parts_sha1[number]:
                return
            self._count(-came)
            fresh = False
        raise IntegrityError("object differs from its recorded hash", where=f"{file.path} part {number + 1}")

    def _ask(self, file: ManifestFile, offset: int, length: int, take: Callable[[memoryview], None]) -> int:
        try:
            return self._store.get_range(file.key, offset, length, take, file_id=file.file_id)
        except IntegrityError:
            raise
        except RemoteError as error:
            if not error.transient and self._store.stat(file.key, file.file_id) is None:
                raise SaveGone("object is not in the store any more", where=self._place(file)) from error
            raise

    def _place(self, file: ManifestFile) -> str:
        return f"{self._store.url}/{file.key}"

    def _count(self, here: int, *, downloaded: int = 0) -> None:
        with self._lock:
            self._here += here
            self._downloaded += downloaded
            told = (self._here, self._downloaded)
        self._progress(*told)

    def _link(self, root: int, link: ManifestSymlink) -> None:
        folder, _, name = link.path.rpartition("/")
        directory = open_dir_below(root, folder, create=True)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            os.symlink(link.target, name, dir_fd=directory)
            if self._job.owner is not None:
                os.chown(name, *self._job.owner, dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(directory)


def check_room(wanted: list[tuple[int, int]]) -> None:
    """(staging directory, bytes) of each file. Raises HostError where they do not fit. What is staged already takes no
    room again."""
    needed: dict[int, int] = {}
    homes: dict[int, set[int]] = {}
    for home, size in wanted:
        device = os.fstat(home).st_dev
        needed[device] = needed.get(device, 0) + size
        homes.setdefault(device, set()).add(home)
    for device, size in needed.items():
        one = next(iter(homes[device]))
        room = os.fstatvfs(one)
        free = room.f_bavail * room.f_frsize
        staged = sum(allocated(home) for home in homes[device])
        if size > free + staged:
            raise HostError(
                f"not enough room to restore: {in_words(size)} needed, {in_words(free)} free",
                where=os.readlink(f"/proc/self/fd/{one}"),  # noqa: PTH115 - text is wanted
                fix="make room (podwatch prune), then restore again",
            )


def by_part(files: Iterable[ManifestFile]) -> dict[str, list[ManifestFile]]:
    parts: dict[str, list[ManifestFile]] = {}
    for file in files:
        parts.setdefault(file.part, []).append(file)
    return parts
