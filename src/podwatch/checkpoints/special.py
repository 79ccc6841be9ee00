"""What no table can say: when Orbax has committed, and the step inside a file of Lightning."""

import re
from collections.abc import Iterator, Mapping

from podwatch.checkpoints.structures import Files, SaveShape, Shortfall, folders_of, matching

# -- Orbax -------------------------------------------------------------------------------------------------------------
# Local file systems: everything is written into ``<name>.orbax-checkpoint-tmp*``, which is renamed. Object stores: the
# directory has its name from the start and ``commit_success.txt`` comes last. Since 2026-08 the renamed ones hold that
# file too; before, ``commit_timestamp_nsecs`` in ``_CHECKPOINT_METADATA`` is set just before the rename.

_COMMIT = "commit_success.txt"
_METADATA = "_CHECKPOINT_METADATA"
_PROCESS = re.compile(r"(?:.*/)?ocdbt\.process_\d+")


def orbax_shortfalls(files: Files, shape: SaveShape) -> Iterator[Shortfall]:
    """The commit, by version; the items that its metadata lists; the arrays of each process."""
    for name in matching(files, ("*.orbax-checkpoint-tmp*",)):
        yield Shortfall(f"{name.partition('/')[0]} is not finished")
    stamps = files[_METADATA].content if _METADATA in files else {}
    stamps = stamps if isinstance(stamps, dict) else {}
    if _COMMIT not in files:
        if matching(files, (f"*/{_COMMIT}",)):
            yield Shortfall(f"{_COMMIT} is missing: it is written last")
        elif not stamps.get("commit_timestamp_nsecs"):
            yield Shortfall(f"{_COMMIT} is missing, and {_METADATA} has no commit time: the save has not finished")
    if set(files) <= {_COMMIT, _METADATA}:
        yield Shortfall("it contains only markers")
    listed = stamps.get("item_handlers")
    for item in sorted(map(str, listed)) if isinstance(listed, dict) else ():
        if not any(name.startswith(f"{item}/") for name in files):
            yield Shortfall(f"{item} is missing, which {_METADATA} lists")
    yield from _arrays(files)
    shape.tokens += [str(stamps[k]) for k in ("init_timestamp_nsecs", "commit_timestamp_nsecs") if stamps.get(k)]


def _arrays(files: Files) -> Iterator[Shortfall]:
    folders = folders_of(files)
    processes = {m.group() for folder in folders if (m := _PROCESS.match(folder))}
    for process in sorted(processes):
        if "manifest.ocdbt" not in folders.get(process, ()) or f"{process}/d" not in folders:
            yield Shortfall(f"the arrays of {process} are missing: it is being removed, or that was interrupted")
    for folder, inside in folders.items():
        described = files[inside["_METADATA"]].content if "_METADATA" in inside else None
        if isinstance(described, dict) and described.get("use_ocdbt") and "manifest.ocdbt" not in inside:
            yield Shortfall(f"{folder}/manifest.ocdbt is missing: it is the index of the arrays")


# -- Lightning ---------------------------------------------------------------------------------------------------------

_NAMED_STEP = re.compile(r"(?:^|[-_/])step=([0-9]{1,18})(?=\D|$)")


def lightning_step(name: str, values: Mapping[str, object]) -> int | None:
    """The step inside the file; while that cannot be read, that of its name, if it has one."""
    step = values.get("global_step")
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    match = _NAMED_STEP.search(name)
    return int(match[1]) if match else None
