"""Checkpoints, judged from outside: what a directory holds, which steps are whole, why not, and what a file is worth.

``open_layout`` opens an output directory as one trainer writes it. Of a ``Layout`` tests use: ``steps()`` (step ->
parts, each with ``name``, ``path``, ``names``, ``required``, ``uploaded``), ``step_paths``, ``part_dir``,
``expect_parts``, ``ahead_of``, ``trackers``, ``pinned``, ``progress``, ``resume_command``, ``first_step_after``,
``target_step``, ``watch_roots``, ``finish_lines``, ``reshards``, ``name`` and ``output_dir``. ``judge`` is its word on
a step as it lies there now; ``catalogue_of`` looks again and again, as the daemon does, and says what is complete.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from podwatch.app.backup import exports
from podwatch.checkpoints import inspect_child, prime_rl
from podwatch.checkpoints.checkpoint_identity import own_files, recorded
from podwatch.checkpoints.command import Command
from podwatch.checkpoints.formats import safetensors, torch_zip, unpickler
from podwatch.checkpoints.inspection import Inspection, InspectionOutcome
from podwatch.checkpoints.inspector import INSPECTOR
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.prime_rl import PrimeRLLayout
from podwatch.checkpoints.records import CheckpointRecord, RecordedFile, lacking
from podwatch.checkpoints.scan import scan_part
from podwatch.checkpoints.shapes import PartFiles, Recognition, Site, Tracker
from podwatch.checkpoints.structures import INDEX
from podwatch.checkpoints.table import SaveEnd, TrainerTable
from podwatch.checkpoints.trackers import wrong_trackers
from podwatch.checkpoints.trainer import all_trainers
from podwatch.checkpoints.trainers import choose, layout_of, make_layout, recognise
from podwatch.checkpoints.trainers import recognised as _recognised
from podwatch.config.settings import CustomLayoutSettings, Settings, TrainerSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry
from podwatch.domain.errors import ConfigurationError
from podwatch.system.pinned_directories import PinnedTree

__all__ = [
    "COMPARING",
    "LAYOUTS",
    "READERS",
    "Catalogue",
    "CheckpointSet",
    "Completeness",
    "ConfigurationError",
    "Inspection",
    "InspectionOutcome",
    "Layout",
    "PartFiles",
    "Recognition",
    "SaveEnd",
    "answer_about",
    "catalogue_of",
    "chosen",
    "configured_layout",
    "custom_layout",
    "file_problem",
    "hf_layout",
    "index_problem",
    "is_legacy_torch_file",
    "judge",
    "legacy_torch_magic",
    "names_in_safetensors",
    "one_reader",
    "open_layout",
    "prime_rl_layout",
    "reader_that_lives",
    "recognised",
    "recognised_as",
    "resume_argv",
    "scan",
    "structure_of",
    "torch_file_problem",
    "values_in_torch_file",
    "without_the_parents_reader",
]  # fmt: skip

COMPARING: list[Callable[[Layout, int, Inspection | None], None]] = []
"""They get every verdict of ``judge``."""
LAYOUTS = tuple(all_trainers())
"""The names of all layouts. ``custom`` needs a configuration."""


class Clock(Protocol):
    """Seconds: monotonic, since boot, since the epoch."""

    def monotonic(self) -> float: ...

    def boottime(self) -> float: ...

    def wall(self) -> float: ...


# -- directories -------------------------------------------------------------------------------------------------------


def open_layout(name: str, output_dir: Path, command: Sequence[str] = (), **options: Any) -> Layout:
    """The layout of this name over an output directory. ``command``: of a fresh start. ``options``: ``checkpoint_dir``
    and ``cwd``, where they are configured."""
    return layout_of(all_trainers()[name], Site(output_dir, command=tuple(command), **options))


def configured_layout(name: str, output_dir: Path, command: Sequence[str]) -> Layout:
    """The same, as a configuration file names it."""
    return make_layout(
        Settings(run_id="r", trainer=TrainerSettings(layout=name, output_dir=output_dir, command=tuple(command)))
    )


def scan(layout: Layout, step: int) -> list[PartFiles]:
    """The parts of a step that is listed, with the files found in each."""
    return [scan_part(part).found for part in layout.steps()[step]]


def judge(layout: Layout, step: int) -> Inspection | None:
    """The layout's word on one step as it lies there now: ``whole``, ``reason``, ``marker``, ``problems``,
    ``leftovers``, ``world_size``, ``save_token``; and whether it has what the saves before it have. None if it does not
    see the step."""
    steps = layout.steps()
    parts = None if step not in steps else [scan_part(part).found for part in steps[step]]
    found = None if parts is None else layout.judge(step, parts)
    if found is not None and found.whole and parts is not None:
        below = [s for s in sorted(steps) if s < step][-2:]
        own = layout.compared(recorded(own_files(parts, found)))
        if why := lacking(step, own, [r for s in below for r in _record(layout, s)], ends=found.ends):
            found = replace(found, outcome=InspectionOutcome.NOT_COMPLETE, lacks=True, reason=why)
    for compare in COMPARING:
        compare(layout, step, found)
    return found


def _record(layout: Layout, step: int) -> list[CheckpointRecord]:
    parts = scan(layout, step)
    found = layout.judge(step, parts)
    own = layout.compared(recorded(own_files(parts, found)))
    return [CheckpointRecord(step, f"save{step}", layout.name, "", own, float(step), ends=found.ends)] * found.whole


def resume_argv(layout: Layout, command: Sequence[str], step: int | None) -> tuple[str, ...]:
    """The command of a start from ``step`` (None: fresh)."""
    return layout.resume_command(command, step, "auto", {}).argv


def recognised(output_dir: Path, command: Sequence[str] = ()) -> list[Recognition]:
    """Every layout that this may be: ``layout``, ``certain``, ``why``."""
    return list(_recognised(Site(output_dir, command=tuple(command))))


def recognised_as(name: str, output_dir: Path, command: Sequence[str] = ()) -> Recognition | None:
    """Whether it may be this one."""
    return recognise(all_trainers()[name], Site(output_dir, command=tuple(command)))


def chosen(output_dir: Path) -> str:
    """The layout that ``auto`` takes."""
    return choose(Site(output_dir)).layout


def catalogue_of(layout: Layout, clock: Clock, **settle: float) -> Catalogue:
    """The daemon's view: ``rescan()`` looks and returns the checkpoints (``step``, ``complete``, ``completeness``,
    ``reason``, ``save_id``), ``verify(step)`` reads deeper and returns what is wrong, ``contents(step)`` lists what
    belongs to it. ``settle``, ``settle_tracker``, ``settle_weak``: seconds that nothing may change."""
    return Catalogue(layout, clock, **settle)  # type: ignore[arg-type]


# -- the child that reads ----------------------------------------------------------------------------------------------


@contextmanager
def one_reader() -> Iterator[None]:
    """One child reads for as long as this lasts: starting one takes longer than most tests."""
    with INSPECTOR:
        yield


@contextmanager
def reader_that_lives() -> Iterator[None]:
    """The same, and it is started now: in a fixture of a file, so that it serves all tests of the file. The files must
    be podwatch's own: a child has the rights of the user for whom it was started."""
    with INSPECTOR:
        INSPECTOR._started()
        yield
        assert INSPECTOR.tree is None


def without_the_parents_reader() -> None:
    """In a process that was forked: the child that reads is the parent's."""
    INSPECTOR._own = threading.local()


ANY_FILE = TrainerTable(parts={"checkpoint": ("{step}",)}, require=(("*",),))


def answer_about(path: Path) -> tuple[str, str]:
    """(outcome, reason) of an inspection that was told of this file as it was listed: 106 bytes of long ago."""
    file = RecordedFile("checkpoint", path.name, _SAID, 0)
    with INSPECTOR:
        found = INSPECTOR.inspect(ANY_FILE, 5, {"checkpoint": path.parent}, (file,))
    return found.outcome, found.reason


# -- single files ------------------------------------------------------------------------------------------------------


def structure_of(path: Path) -> tuple[str, bool, object]:
    """(what is wrong with the structure of one file, by its name; whether its end cannot be seen; its content)."""
    with path.open("rb") as file:
        return inspect_child._structure(file.fileno(), path.name, True)


def file_problem(path: Path) -> str:
    """What is wrong with the structure of one file, by its name; empty: nothing, or unknown."""
    return structure_of(path)[0]


def torch_file_problem(path: Path) -> str:
    return torch_zip.check(path)


def values_in_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote, numbers and texts only; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return unpickler.zip_values(file)
    except Exception:
        return None


def is_legacy_torch_file(path: Path) -> bool:
    return torch_zip.is_legacy(path)


def legacy_torch_magic() -> bytes:
    """What a file of torch's old format begins with."""
    return torch_zip.LEGACY_MAGIC


def names_in_safetensors(path: Path) -> frozenset[str]:
    """The names of its tensors. Fails if its header has a problem."""
    header = safetensors.read_header(path)
    assert header.problem == ""
    return frozenset(header.names)


def index_problem(path: Path) -> str:
    """What is wrong with an index of safetensors."""
    return safetensors.read_index(path).problem


# -- everything that reads a file which a training user controls -------------------------------------------------------


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.name, "p", _SAID, 0)


_SAID = 106
"""Bytes that a listing said a file has."""


def _inspected(path: Path) -> object:
    """What the child says of the file as it is now, if it is one."""
    try:
        status = path.lstat()
        file = RecordedFile("checkpoint", path.name, status.st_size, status.st_mtime_ns)
    except OSError:
        return "absent"
    found = INSPECTOR.inspect(
        TrainerTable(parts={"checkpoint": ("{step}",)}, require=(("*",),)), 5, {"checkpoint": path.parent}, (file,)
    )
    return found.outcome, found.faults, found.unsized, found.hole


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "safetensors header": ("model.safetensors", _inspected),
    "index": ("model.safetensors.index.json", _inspected),
    "index of an export": ("x.safetensors.index.json", lambda p: exports._without_shards(p.parent, [_entry(p)])),
    "torch file": ("model.pt", _inspected),
    "any .bin": ("model.bin", _inspected),
    "json": ("config.json", _inspected),
    "dcp index": (INDEX, _inspected),
    "torch values": ("model.pt", INSPECTOR.values),
    "a tracker": ("latest", lambda p: wrong_trackers([Tracker(p, content=b"7")], PinnedTree([p.parent]))),
    "the child's tracker": ("latest", lambda p: inspect_child._tracker(p).text),
    "a command's toml": ("run.toml", lambda p: Command(["x", "@", str(p)], Path("/")).documents),
    "a command's script": ("train.sh", lambda p: Command(["bash", str(p)]).programs),
    "a mention": ("train.sh", lambda p: prime_rl._mentions(p, "secret")),
}
"""Name -> (a file name that it reads, how)."""


# -- layouts of one name -----------------------------------------------------------------------------------------------


def hf_layout(output_dir: Path) -> Layout:
    return open_layout("hf", output_dir)


def prime_rl_layout(output_dir: Path, *, command: Sequence[str] = (), **options: Any) -> PrimeRLLayout:
    """``options`` as those of ``open_layout``."""
    layout = open_layout("prime-rl", output_dir, command, **options)
    assert isinstance(layout, PrimeRLLayout)
    return layout


def custom_layout(output_dir: Path, settings: CustomLayoutSettings) -> Layout:
    return layout_of(all_trainers()["custom"], Site(output_dir, custom=settings))
