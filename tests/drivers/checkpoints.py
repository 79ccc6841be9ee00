"""Checkpoints, judged from outside: what a directory holds, which steps are whole, why not, and what a file is worth.

``open_layout`` opens an output directory as one trainer writes it. Of a ``Layout`` tests use: ``steps()`` (step ->
parts, each with ``name``, ``path``, ``names``, ``required``, ``uploaded``), ``step_paths``, ``part_dir``,
``expect_parts``, ``ahead_of``, ``trackers``, ``pinned``, ``progress``, ``resume_command``, ``first_step_after``,
``target_step``, ``watch_roots``, ``finish_lines``, ``reshards``, ``name`` and ``output_dir``. ``judge`` is its word on
a step as it lies there now; ``catalogue_of`` looks again and again, as the daemon does, and says what is complete.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from podwatch.checkpoints.formats import dcp, files, safetensors, sandbox, torch_zip
from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.layouts import KINDS, command_line, hf, make_layout, prime_rl_run, shared_rules
from podwatch.checkpoints.layouts import recognised as _recognised
from podwatch.checkpoints.layouts.base import Judgement, Layout, Marker, PartFiles, Recognition, Site, counts_saves
from podwatch.checkpoints.layouts.choose_layout import choose
from podwatch.checkpoints.layouts.shared_rules import Inside
from podwatch.checkpoints.scan import scan_part
from podwatch.config.settings import Settings, TrainerSettings
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry
from podwatch.domain.errors import ConfigurationError
from podwatch.sync.upload import optional_parts

__all__ = [
    "COMPARING", "LAYOUTS", "READERS", "Catalogue", "CheckpointSet", "Completeness", "ConfigurationError", "Judgement",
    "Layout", "Marker", "PartFiles", "Recognition", "before_the_child_reads", "catalogue_of", "chosen",
    "configured_layout", "counts_saves", "file_problem", "index_problem", "is_legacy_torch_file", "judge",
    "legacy_torch_magic", "names_in_safetensors", "one_reader", "open_layout", "parse_dcp_index", "recognised",
    "recognised_as", "resume_argv", "scan", "torch_file_problem", "values_in_torch_file", "without_the_parents_reader",
]  # fmt: skip

COMPARING: list[Callable[[Layout, int, Judgement | None], None]] = []
"""They get every verdict of ``judge``."""
LAYOUTS = tuple(KINDS)
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
    return KINDS[name].make(Site(output_dir, command=tuple(command), **options))


def configured_layout(name: str, output_dir: Path, command: Sequence[str]) -> Layout:
    """The same, as a configuration file names it."""
    return make_layout(
        Settings(run_id="r", trainer=TrainerSettings(layout=name, output_dir=output_dir, command=tuple(command)))
    )


def scan(layout: Layout, step: int) -> list[PartFiles]:
    """The parts of a step that is listed, with the files found in each."""
    return [scan_part(part).found for part in layout.steps()[step]]


def judge(layout: Layout, step: int) -> Judgement | None:
    """The layout's word on one step as it lies there now: ``whole``, ``reason``, ``marker``, ``problems``,
    ``leftovers``, ``world_size``, ``save_token``. None if it does not see the step."""
    parts = layout.steps().get(step)
    found = None if parts is None else layout.judge(step, [scan_part(part).found for part in parts])
    for compare in COMPARING:
        compare(layout, step, found)
    return found


def resume_argv(layout: Layout, command: Sequence[str], step: int | None) -> tuple[str, ...]:
    """The command of a start from ``step`` (None: fresh)."""
    return layout.resume_command(command, step, "auto", {}).argv


def recognised(output_dir: Path, command: Sequence[str] = ()) -> list[Recognition]:
    """Every layout that this may be: ``layout``, ``certain``, ``why``."""
    return list(_recognised(Site(output_dir, command=tuple(command))))


def recognised_as(name: str, output_dir: Path, command: Sequence[str] = ()) -> Recognition | None:
    """Whether it may be this one."""
    return KINDS[name].recognise(Site(output_dir, command=tuple(command)))


def chosen(output_dir: Path) -> str:
    """The layout that ``auto`` takes."""
    return choose(Site(output_dir), KINDS.values()).layout


def catalogue_of(layout: Layout, clock: Clock, **settle: float) -> Catalogue:
    """The daemon's view: ``rescan()`` looks and returns the checkpoints (``step``, ``complete``, ``completeness``,
    ``reason``, ``save_id``), ``verify(step)`` reads deeper and returns what is wrong, ``contents(step)`` lists what
    belongs to it. ``settle``, ``settle_tracker``, ``settle_weak``: seconds that nothing may change."""
    return Catalogue(layout, clock, **settle)  # type: ignore[arg-type]


# -- the child that reads ----------------------------------------------------------------------------------------------


@contextmanager
def one_reader() -> Iterator[None]:
    """One child reads for as long as this lasts: starting one takes longer than most tests."""
    with sandbox.session():
        yield


def without_the_parents_reader() -> None:
    """In a process that was forked: the child that reads is the parent's."""
    sandbox._local.open, sandbox._local.reader = False, None


def parse_dcp_index(path: Path) -> tuple[object, bool, bool]:
    """(answer or None, whether it is gone, whether it is unreadable), as the child says."""
    parsed = sandbox.parse("dcp", path)
    return parsed.answer, parsed.gone, parsed.unreadable


def before_the_child_reads(monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """``act`` happens after a file was opened, and before the child is asked to read it."""
    real = sandbox._Reader.ask

    def ask(self: sandbox._Reader, mode: str, path: Path, descriptor: int) -> object:
        act(path)
        return real(self, mode, path, descriptor)

    monkeypatch.setattr(sandbox._Reader, "ask", ask)


# -- single files ------------------------------------------------------------------------------------------------------


def file_problem(path: Path) -> str:
    """What is wrong with the structure of one file, by its name; empty: nothing, or unknown."""
    return files.check_file(path)


def torch_file_problem(path: Path) -> str:
    return torch_zip.check(path)


def values_in_torch_file(path: Path) -> Any:
    """What ``torch.save`` wrote, numbers and texts only; None if it cannot be read."""
    return torch_zip.read_values(path)


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


def _inside(path: Path) -> Inside:
    return Inside(path.parent, {path.name: _entry(path)})


_SAID = 106
"""Bytes that a listing said a file has."""
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "safetensors header": ("model.safetensors", safetensors.read_header),
    "index": ("model.safetensors.index.json", safetensors.read_index),
    "index of an export": ("x.safetensors.index.json", lambda p: optional_parts._without_shards(p.parent, [_entry(p)])),
    "torch file": ("model.pt", torch_zip.check),
    "old torch format": ("model.pt", torch_zip.is_legacy),
    "torch values": ("model.pt", torch_zip.read_values),
    "any .bin": ("model.bin", files.check_file),
    "json": ("config.json", files.check_json),
    "holes": ("model.bin", files.has_hole),
    "dcp index": (".metadata", lambda p: sandbox.parse("dcp", p)),
    "dcp records": (".metadata", lambda p: dcp.check_records(p.parent)),
    "a marker": ("DONE", lambda p: _inside(p).text(p.name)),
    "a state": ("trainer_state.json", lambda p: _inside(p).json(p.name)),
    "a tracker": ("latest", shared_rules.text),
    "trainer state of hf": ("trainer_state.json", lambda p: hf._pinned(p.parent.parent)),
    "a command's toml": ("run.toml", lambda p: command_line.toml_documents(["x", "@", str(p)], None)),
    "a command's script": ("train.sh", lambda p: command_line.program(["bash", str(p)])),
    "a mention": ("train.sh", lambda p: prime_rl_run._mentions(p, "secret")),
}  # fmt: skip
"""Name -> (a file name that it reads, how)."""
