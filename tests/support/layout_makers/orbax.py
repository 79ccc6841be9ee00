"""``CheckpointManager.save`` on a local file system, and with a commit file."""

import json
from pathlib import Path

from tests.support.layout_makers._writing import Operation, mkdir, rename, write, write_json

NODE = bytes.fromhex("0cdb20de")
MANIFEST = bytes.fromhex("0cdb3a2a")


def ocdbt(magic: bytes, body: bytes) -> bytes:
    return magic + (len(body) + 12).to_bytes(8, "little") + body


def _item(directory: Path, final: Path, commit: bool) -> list[Operation]:
    done = mkdir(directory)
    done += write(directory / "ocdbt.process_0" / "d" / "27915983", ocdbt(NODE, b"v" * 150))
    done += write(directory / "ocdbt.process_0" / "manifest.ocdbt", ocdbt(MANIFEST, b"m" * 100))
    done += write_json(directory / "_METADATA", {"tree_metadata": {}, "use_ocdbt": True})
    done += write(directory / "d" / "691c7030", ocdbt(NODE, b"v" * 190))
    done += write(directory / "manifest.ocdbt", ocdbt(MANIFEST, b"m" * 90))
    if commit:
        done += write(directory / "commit_success.txt", f"Checkpoint commit was successful to {final}".encode())
    return done


def _times(path: Path, committed: bool) -> list[Operation]:
    stamps = {"init_timestamp_nsecs": 1795268340474349583, "commit_timestamp_nsecs": 1795268340530294959}
    values = {"item_handlers": {}, **(stamps if committed else {**stamps, "commit_timestamp_nsecs": None})}
    return [lambda: (path.parent.mkdir(parents=True, exist_ok=True), path.write_text(json.dumps(values)))]


def operations(output_dir: Path, step: int, name: str = "{step}", *, commit: bool = True) -> list[Operation]:
    """Rename mode. ``commit``: versions from August 2026 write commit files as well."""
    final = output_dir / name.format(step=step)
    staged = output_dir / f"{final.name}.orbax-checkpoint-tmp"
    done = mkdir(staged) + _times(staged / "_CHECKPOINT_METADATA", False)
    item = staged / "state.orbax-checkpoint-tmp"
    done += _item(item, staged / "state", commit) + rename(item, staged / "state")
    done += _times(staged / "_CHECKPOINT_METADATA", True)
    if commit:
        done += write(staged / "commit_success.txt", b"Checkpoint commit was successful")
    return done + rename(staged, final)


def by_commit_file(output_dir: Path, step: int) -> list[Operation]:
    """The directory has its name from the start. What a commit file says is for people: only that it is there counts,
    and it is written at once."""
    final = output_dir / str(step)
    done = mkdir(final) + _times(final / "_CHECKPOINT_METADATA", False)
    done += _item(final / "state", final / "state", True)
    done += _times(final / "_CHECKPOINT_METADATA", True)
    return [*done, lambda: (final / "commit_success.txt").write_text(f"Checkpoint commit was successful to {final}")]
