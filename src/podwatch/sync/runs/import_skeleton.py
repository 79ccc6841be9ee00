"""Decides whether a backup in the store is a complete checkpoint, by running its layout's own rule on a skeleton of it.

The skeleton has every file at its full size and with its time. Small files are whole; of large ones it has the first
and last two megabytes, which is all that a layout's rule reads, and a hole between. A 47 GB checkpoint costs some
megabytes of download.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podwatch.checkpoints import set_identity
from podwatch.checkpoints.formats.files import sparse_on_purpose
from podwatch.checkpoints.layouts import shared_rules
from podwatch.checkpoints.layouts.base import Judgement, Layout, PartFiles
from podwatch.checkpoints.scan import scan_part
from podwatch.domain.errors import PodwatchError, RemoteError
from podwatch.stores.base import ObjectStore, StoredObject
from podwatch.system.pinned import PinnedTree

END_BYTES = 2 << 20
"""Bytes of each end of a large file: enough for a zip directory of 10,000 tensors and any shard's safetensors
header."""
WHOLE_BYTES = 4 << 20
INDEX_BYTES = 64 << 20
"""Indexes are read whole: DCP's ``.metadata``, JSON."""
_INDEX_NAMES = (".metadata", ".json")
_STEP_NAMES = ("step_{0}", "global_step_{0}", "global_step{0}", "checkpoint-{0}", "iter_{0:07d}", "step-{0}", "{0}")


class Unfit(Exception):  # noqa: N818 - internal: the reason why a backup is refused
    """The text is shown to the operator."""


class _Enough(Exception):  # noqa: N818 - ends a download that has all that is needed
    pass


MakeLayout = Callable[[Path], Layout]
"""The run's layout for another output_dir."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a backup. ``path`` is relative to the backup's step directory, and safe."""

    path: str
    stored: StoredObject
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FitFile:
    """``part`` and ``path`` (inside the part) are the file's place in the layout."""

    item: Item
    part: str
    path: str


@dataclass(frozen=True, slots=True)
class Fit:
    """A complete checkpoint. ``others``: the number of objects of the backup that do not belong to it."""

    step: int
    layout: str
    save_id: str
    files: tuple[FitFile, ...]
    world_size: int | None
    others: int

    @property
    def total_bytes(self) -> int:
        return sum(f.item.stored.size for f in self.files)


def fit(store: ObjectStore, step: int, items: Sequence[Item], make: MakeLayout, scratch: Path) -> Fit:
    """``make`` builds the layout for an output directory; ``scratch`` is an empty directory of ours. Raises Unfit with
    the reason, RemoteError for store trouble, OSError where the skeleton cannot be written."""
    raw = scratch / "raw"
    raw.mkdir()
    for number, item in enumerate(items):
        _skeleton(store, item, raw / str(number))
    reasons: list[str] = []
    for number, place in enumerate(_places(step, items, make)):
        out = scratch / str(number) / "out"
        try:
            found = _try(place, step, items, raw, make(out), out)
        except Unfit as error:
            reasons.append(str(error))
            continue
        if found is not None:
            return found
    tops = sorted({i.path.partition("/")[0] for i in items})
    shown = ", ".join(tops[:6]) + (", ..." if len(tops) > 6 else "")
    raise Unfit(reasons[0] if reasons else f"the layout finds no checkpoint in it (it contains {shown})")


# -- places where the files could belong -----------------------------------------------------------------------------

_Place = Callable[[str, Path, Layout], Path | None]
"""(path in the backup, output directory, its layout) -> the file's place, None if it has none."""


def _places(step: int, items: Sequence[Item], make: MakeLayout) -> Iterator[_Place]:
    tops = {i.path.partition("/")[0] for i in items if "/" in i.path}
    yield lambda path, _, layout: _by_part(path, step, layout, tops)
    yield lambda path, _, layout: _in_main_part(path, step, layout)
    layout = make(Path("/nonexistent/out"))
    roots = [os.path.relpath(root, "/nonexistent/out") for root in layout.watch_roots()]
    for root in roots:
        for name in _STEP_NAMES:
            yield _below(f"{root}/{name.format(step)}")
    yield lambda path, out, _: out / path


def _below(directory: str) -> _Place:
    """For a backup that is a step directory of this name."""
    return lambda path, out, _: out / directory / path


def _by_part(path: str, step: int, layout: Layout, tops: set[str]) -> Path | None:
    """For a backup whose directories have the names of the layout's parts."""
    part, _, inside = path.partition("/")
    if not layout.variant:
        layout.expect_parts(tops)
    with contextlib.suppress(PodwatchError, KeyError, ValueError):
        return layout.part_dir(part, step) / inside if inside else None
    return None


def _in_main_part(path: str, step: int, layout: Layout) -> Path | None:
    """For a backup of the step directory of a layout with one part."""
    with contextlib.suppress(PodwatchError, KeyError, ValueError):
        return layout.part_dir("checkpoint", step) / path
    return None


def _try(place: _Place, step: int, items: Sequence[Item], raw: Path, layout: Layout, out: Path) -> Fit | None:
    """None where the layout sees no such step in this arrangement. Raises Unfit where the step is there but
    incomplete."""
    out.mkdir(parents=True)
    back: dict[str, Item] = {}
    for number, item in enumerate(items):
        target = place(item.path, out, layout)
        if target is None or out not in target.parents:
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(raw / str(number), target)
        except (FileExistsError, NotADirectoryError):
            raise Unfit("one of its names is a file and a directory") from None
        back[str(target)] = item
    if not back:
        return None
    try:
        with sparse_on_purpose():
            parts = layout.steps().get(step)
            if parts is None:
                return None
            with contextlib.closing(PinnedTree((out, *layout.watch_roots()))) as tree:
                shared_rules.repair(layout.trackers(step), tree, only_missing=True)
            found = tuple(scan_part(part).found for part in parts)
            if not any(p.part.required and p.present for p in found):
                return None
            judgement = layout.judge(step, found)
    except (PodwatchError, ValueError) as error:
        raise Unfit(f"the layout cannot judge it: {error}") from error
    if not judgement.whole:
        raise Unfit(judgement.reason or "it is not complete")
    return _fitted(step, layout, found, judgement, back, len(items))


def _fitted(
    step: int,
    layout: Layout,
    found: tuple[PartFiles, ...],
    judgement: Judgement,
    back: dict[str, Item],
    count: int,
) -> Fit:
    leftovers = frozenset(judgement.leftovers)
    files = tuple(
        FitFile(back[str(part.part.path / file.path)], part.part.name, file.path)
        for part in found
        if part.part.uploaded
        for file in part.files
        if set_identity.belongs(file, leftovers) and str(part.part.path / file.path) in back
    )
    name = set_identity.save_id(found, judgement)
    return Fit(step, layout.name, name, files, judgement.world_size, count - len(files))


# -- skeleton --------------------------------------------------------------------------------------------------------


class _First:
    """Takes the first bytes of a download, then ends it."""

    def __init__(self, most: int) -> None:
        self.data = bytearray()
        self._most = most

    def write(self, data: bytes) -> int:
        self.data += memoryview(data)[: self._most - len(self.data)]
        if len(self.data) >= self._most:
            raise _Enough
        return len(data)


def _skeleton(store: ObjectStore, item: Item, target: Path) -> None:
    size = item.stored.size
    whole = INDEX_BYTES if item.path.endswith(_INDEX_NAMES) else WHOLE_BYTES
    with target.open("xb") as file:
        if 0 < size <= whole:
            file.write(_read(store, item.stored, 0, size))
        elif size:
            os.ftruncate(file.fileno(), size)
            file.write(_read(store, item.stored, 0, END_BYTES))
            file.seek(size - END_BYTES)
            file.write(_read(store, item.stored, size - END_BYTES, END_BYTES))
    if target.stat().st_size != size:
        raise RemoteError("the object is shorter than listed", where=f"{store.url}/{item.stored.key}")
    os.utime(target, ns=(item.mtime_ns, item.mtime_ns))


def _read(store: ObjectStore, stored: StoredObject, offset: int, length: int) -> bytes:
    first = _First(length)
    with contextlib.suppress(_Enough):
        store.get_file(stored.key, first, file_id=stored.file_id, offset=offset)  # type: ignore[arg-type]
    return bytes(first.data)
