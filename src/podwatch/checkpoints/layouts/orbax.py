"""Orbax (JAX): ``N``, ``<prefix>_N`` or zero-padded, one directory per step.

Local file systems: all is written into ``<name>.orbax-checkpoint-tmp*``, which is renamed; object stores and
``CommitFileTemporaryPath``: the directory has its name from the start and ``commit_success.txt`` comes last. From
2026-08 (a97e5061) the renamed ones hold that file too; before, ``commit_timestamp_nsecs`` in ``_CHECKPOINT_METADATA``
is set just before the rename. Orbax never saves over a finished step. N is what the program passes to ``save``. OCDBT
data files do not contain their size, so only the hash taken at upload finds a truncated one.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts.base import Judgement, Kind, Layout, Marker, Recognition, Site, Source
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_directory import Entry, Found, SharedDirs
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, all_step_names
from podwatch.system.files import opened

STEP = re.compile(r"(?:.*_)?([0-9]{1,18})")
COMMIT = "commit_success.txt"
METADATA = "_CHECKPOINT_METADATA"
_UNFINISHED = re.compile(r"(?:.*_)?([0-9]{1,18})\.orbax-checkpoint-tmp.*")
_TELLING = (METADATA, COMMIT, "_METADATA", "manifest.ocdbt")
_MANIFEST = bytes.fromhex("0cdb3a2a")
"""First bytes of an OCDBT manifest; then its length in eight, little end first."""
_COMMIT = "3ff7b24aa0e23db4a575f7dc4bc6f815008ac6fd"


def judge(view: StepView) -> Judgement:
    inside = view.only
    root = inside.path.parent
    view.alone(n for n in all_step_names(root, STEP).get(view.step, ()) if _is_orbax(root / n))
    staged = [n for n in sorted(inside.files) if ".orbax-checkpoint-tmp" in n]
    if staged:
        raise inside.fault(f"{staged[0].partition('/')[0]} is not finished")
    stamps = _stamps(inside)
    if COMMIT not in inside.files:
        if inside.names(rf".*/{COMMIT}"):
            raise inside.fault(f"{COMMIT} is missing: it is written last")
        if not stamps.get("commit_timestamp_nsecs"):
            raise inside.fault(f"no {COMMIT}, and {METADATA} has no commit time: the save has not finished")
    _items(inside, stamps)
    for name in inside.names(r"(?:.*/)?_METADATA"):
        described = inside.json(name)
        folder = inside.below(name.rpartition("/")[0]) if "/" in name else inside
        if isinstance(described, dict) and described.get("use_ocdbt"):
            folder.require("manifest.ocdbt", why="it is the index of the arrays")
    for name in inside.names(r"(?:.*/)?manifest\.ocdbt"):
        _manifest(inside, name)
    inside.sound()
    token = "-".join(str(stamps[k]) for k in ("init_timestamp_nsecs", "commit_timestamp_nsecs") if stamps.get(k))
    return Judgement(True, marker=Marker.COMMIT, save_token=token)


def _stamps(inside: Inside) -> dict[str, object]:
    found = inside.json(METADATA) if METADATA in inside.files else {}
    return found if isinstance(found, dict) else {}


def _items(inside: Inside, stamps: Mapping[str, object]) -> None:
    """Require the listed items: in a half-deleted directory the markers can be the last files."""
    listed = stamps.get("item_handlers")
    for item in sorted(map(str, listed)) if isinstance(listed, dict) else ():
        if not inside.below(item).files:
            raise inside.fault(f"{item} is missing, which {METADATA} lists")
    for name in sorted({m.group(1) for m in inside.matches(r"((?:.*/)?ocdbt\.process_\d+)/.*")}):
        process = inside.below(name)
        if "manifest.ocdbt" not in process.files or not process.below("d").files:
            raise process.fault("its arrays are gone: it is being removed, or the removal was interrupted")
    if set(inside.files) <= {COMMIT, METADATA}:
        raise inside.fault("it contains only markers")


def _manifest(inside: Inside, name: str) -> None:
    with opened(inside.path / name) as file:
        head = file.read(12)
    if head[:4] != _MANIFEST or int.from_bytes(head[4:12], "little") != inside.files[name].size:
        raise inside.fault(f"{name} is truncated or damaged", damaged=True)


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=None,
        ask="Orbax is a library, so podwatch cannot know how the program restores",
        example='["--restore_step", "{step}"]; podwatch moves later steps to quarantine, so if the program'
        ' restores latest_step(), set it to "none"',
    )


def _also_ahead(root: Path, step: int | None) -> tuple[Path, ...]:
    limit = -1 if step is None else step
    names = all_step_names(root, _UNFINISHED)
    return tuple(root / name for number in sorted(names) if number > limit for name in sorted(names[number]))


RULES = Rules(
    name="orbax",
    step=STEP,
    directory="{step}",
    judge=judge,
    preset=_preset,
    sources=(
        Source("google/orbax", "checkpoint/orbax/checkpoint/_src/path/atomicity.py", _COMMIT),
        Source("google/orbax", "checkpoint/orbax/checkpoint/_src/path/step.py", _COMMIT),
        Source("google/orbax", "checkpoint/orbax/checkpoint/_src/metadata/checkpoint.py", _COMMIT),
    ),
    reshards=True,
    also_ahead=_also_ahead,
    told_by=METADATA,
)


def _root(site: Site) -> Path:
    return site.checkpoint_dir or site.output_dir


def find(site: Site) -> Found:
    """Find the steps. Many programs use names that end in a number: only directories with a file of Orbax count."""
    root = _root(site)
    found: dict[int, list[Entry]] = {}
    for step, names in all_step_names(root, STEP).items():
        own = [n for n in sorted(names) if _is_orbax(root / n)]
        if own:
            found[step] = [Entry(root, n) for n in own]
    return found


def _is_orbax(directory: Path) -> bool:
    return any((directory / n).exists() for n in _TELLING)


def make(site: Site) -> Layout:
    return SharedDirs(site, RULES, lambda: find(site), {"checkpoint": _root(site)})


def recognise(site: Site) -> Recognition | None:
    for entries in list(find(site).values())[-3:]:
        return Recognition("orbax", f"{entries[0].name} contains {METADATA}", certain=True)
    root = _root(site)
    for names in all_step_names(root, _UNFINISHED).values():
        return Recognition("orbax", f"{names[0]} is an unfinished save of Orbax", certain=True)
    return None


KIND = Kind("orbax", make, recognise)
