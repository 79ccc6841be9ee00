"""Lightning: ``<anything>.ckpt``, one file per checkpoint, or a directory for sharded strategies.

The step is ``global_step`` inside the file; the name can omit it, or contain a metric called "step". A file is written
into the system's temporary directory and moved, so on one file system it appears complete and across two it grows under
its final name: the zip directory at its end is the marker. FSDP: DCP files, then ``meta.pt``; DeepSpeed:
``<name>.ckpt/checkpoint/`` and ``latest``. ``last.ckpt`` is a copy, or a symlink, which podwatch sets to the step
before a start. Every start makes a new ``version_K`` directory, so all of them are searched. Files saved with
``save_weights_only`` have no optimizer and are no resume points.
"""

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.formats import sandbox, torch_zip
from podwatch.checkpoints.layouts import command_line, deepspeed, shared_rules, step_dirs
from podwatch.checkpoints.layouts.base import (
    Judgement,
    Kind,
    Layout,
    Marker,
    Recognition,
    Site,
    Source,
    Tracker,
    Weights,
)
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_directory import Entry, Found, SharedDirs
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules
from podwatch.domain.trainer_log import EpochBar, TrainerLog

META = "meta.pt"
_NAME = re.compile(r"(?:^|[-_/])step=([0-9]{1,18})(?=\D|$)")
_LAST = re.compile(r"last(?:-v\d+)?\.ckpt")
_PLACES = ("", "checkpoints", "*/checkpoints", "*/*/checkpoints")
"""dirpath itself; without a logger; ``<logger>/<version>/checkpoints``, also below a project directory."""
_FLAG, _KEY = "--ckpt_path", "ckpt_path"
_Read = tuple[tuple[int, int, int], int | None]
_COMMIT = "7f0c3436cd3f6ad3753125672024fc415cbcb414"


def judge(view: StepView) -> Judgement:
    inside = view.only
    if inside.prefix:
        return _directory(inside)
    name = next(iter(inside.files))
    problem = torch_zip.check(inside.path / name)
    if problem:
        raise inside.fault(f"{name} {problem}", damaged=True)
    if torch_zip.is_legacy(inside.path / name):
        return Judgement(True, marker=Marker.NONE)
    values = inside.values(name)
    if "state_dict#" in values and "optimizer_states#" not in values:
        raise inside.fault(f"{name} contains weights only (save_weights_only), so training cannot resume from it")
    return Judgement(True, marker=Marker.COMMIT)


def _directory(inside: Inside) -> Judgement:
    tag = inside.below("checkpoint")
    if deepspeed.present(tag) or "latest" in inside.files:
        zero = deepspeed.closed(inside, ("checkpoint",))
        inside.sound()
        return Judgement(True, marker=Marker.LAST_FILE if zero.ranks else Marker.NONE, world_size=zero.ranks)
    token, leftovers = step_dirs.check(inside)
    if not token:
        raise inside.fault("it contains neither DCP nor DeepSpeed files")
    inside.written_last(META)
    inside.sound()
    return Judgement(True, marker=Marker.COMMIT, save_token=token, leftovers=leftovers)


class Lightning(SharedDirs):
    """Caches each file's step by inode, size and mtime: reading it costs a few milliseconds, once."""

    def __init__(self, site: Site) -> None:
        self._base = site.checkpoint_dir or site.output_dir
        self._patterns = ("",) if site.checkpoint_dir else _PLACES
        self._steps: dict[str, _Read] = {}
        self._best: tuple[Path | None, Mapping[int, str]] = (None, {})
        home = self._base if site.checkpoint_dir else self._base / "checkpoints"
        super().__init__(site, RULES, self.find, {"checkpoint": home})

    def find(self) -> Found:
        """Find the checkpoints. ``last`` copies count only where no other file has the step, older files only where no
        newer one has it."""
        found: dict[int, list[tuple[bool, int, Entry]]] = {}
        known, fresh = self._steps, dict[str, _Read]()
        with sandbox.session():
            for folder in self._folders():
                for name, status in _checkpoints(folder):
                    path = folder / name
                    read, told = _telling(path, status)
                    stamp = (told.st_ino, told.st_size, told.st_mtime_ns)
                    old = known.get(str(path))
                    step = old[1] if old is not None and old[0] == stamp else _step(path.name, read)
                    fresh[str(path)] = (stamp, step)
                    if step is not None:
                        entry = Entry(folder, name)
                        found.setdefault(step, []).append((bool(_LAST.fullmatch(name)), -status.st_mtime_ns, entry))
        self._steps = fresh
        return {s: [e for _, _, e in sorted(few, key=lambda f: (*f[:2], f[2].name))] for s, few in found.items()}

    def _folders(self) -> list[Path]:
        seen: dict[Path, None] = {}
        for pattern in self._patterns:
            for folder in (self._base,) if not pattern else sorted(self._base.glob(pattern)):
                if folder.is_dir() and (not pattern or not folder.is_symlink()):  # output_dir itself can be a link
                    seen[folder] = None
        return list(seen)

    def watch_roots(self) -> tuple[Path, ...]:
        """Also the directory in which the next start creates its version, the newest version, in which ``checkpoints``
        will appear, and files whose step is not readable yet: they grow without changing their directory."""
        self.find()
        folders = self._folders()
        logs = {f.parents[1] for f in folders if self._base in f.parents[1].parents} | {self._base / "lightning_logs"}
        roots = dict.fromkeys((*folders, *self._places.values()))
        for log in sorted(logs) if len(self._patterns) > 1 else ():
            roots.update(dict.fromkeys((log, *_newest_dir(log))))
        roots.update((Path(path), None) for path, (_, step) in self._steps.items() if step is None)
        return tuple(roots)

    def trackers(self, step: int | None) -> tuple[Tracker, ...]:
        """Links called ``last`` beside the step's file. A link to another directory belongs to another version of the
        run."""
        entries = self.find().get(step, ()) if step is not None else ()
        if not entries:
            return ()
        links = [p for p in sorted(entries[0].root.glob("last*.ckpt")) if p.is_symlink() and _LAST.fullmatch(p.name)]
        return tuple(Tracker(p, target=entries[0].name) for p in links)

    def ahead_of(self, step: int | None) -> tuple[Path, ...]:
        paths = super().ahead_of(step)
        if step is None:
            links = [p for f in self._folders() for p in sorted(f.glob("last*.ckpt")) if p.is_symlink()]
            paths = (*paths, *(p for p in links if p not in paths))
        return paths

    def pinned(self) -> Mapping[int, str]:
        """The steps that ``last`` links name, and the best one as recorded in the newest checkpoint."""
        found = self.find()
        by_path = {e.path: step for step, entries in found.items() for e in entries}
        pins: dict[int, str] = dict(self._best_of(found, by_path))
        for folder in self._folders():
            for link in sorted(folder.glob("last*.ckpt")):
                step = by_path.get(folder / shared_rules.link_target(link)) if link.is_symlink() else None
                if step is not None:
                    pins[step] = link.name
        return pins

    def _best_of(self, found: Found, by_path: Mapping[Path, int]) -> Mapping[int, str]:
        newest = found[max(found)][0].path if found else None
        if newest is None or not newest.is_file():
            return {}
        if newest != self._best[0]:
            values = torch_zip.read_values(newest) or {}
            names = {os.path.basename(str(v)) for k, v in values.items() if k.endswith(".best_model_path") and v}  # noqa: PTH119
            self._best = (newest, {s: "best_model_path" for p, s in by_path.items() if p.name in names})
        return self._best[1]


def _newest_dir(folder: Path) -> tuple[Path, ...]:
    try:
        found = [p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()]
        return (max(found, key=lambda p: p.stat().st_mtime_ns),) if found else ()
    except OSError:
        return ()


def _checkpoints(folder: Path) -> list[tuple[str, os.stat_result]]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".ckpt") and not entry.is_symlink():
                    try:
                        found.append((entry.name, entry.stat(follow_symlinks=False)))
                    except (FileNotFoundError, NotADirectoryError):
                        continue  # rotated away meanwhile
    except (FileNotFoundError, NotADirectoryError):
        pass
    return found


def _telling(path: Path, status: os.stat_result) -> tuple[Path | None, os.stat_result]:
    """The file that contains the step, and its status; for a directory without such a file its own status."""
    if not stat.S_ISDIR(status.st_mode):
        return path, status
    for file in (path / META, *sorted((path / "checkpoint").glob("*_model_states.pt"))[:1]):
        try:
            return file, file.stat()
        except OSError:
            continue
    return None, status


def _step(name: str, file: Path | None) -> int | None:
    """The step from inside the file, or while that cannot be read (a growing file or directory) from the name, if it
    has one."""
    values = _values(file) if file is not None else {}
    step = values.get("global_step")
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    match = _NAME.search(name)
    return int(match.group(1)) if match else None


def _values(file: Path) -> Mapping[str, object]:
    """The values of the file; empty while it cannot be read. The zip is checked first, because reading values needs a
    child process."""
    try:
        return {} if torch_zip.check(file) else torch_zip.read_values(file) or {}
    except OSError:
        return {}


def _preset(site: Site, command: Sequence[str]) -> Preset:
    """LightningCLI has ``fit --ckpt_path``; Hydra templates have ``ckpt_path=``. Other scripts are unknown."""
    hydra = command_line.key_value(command, (_KEY,)) is not None or any(a.startswith("trainer.") for a in command)
    if hydra:
        return Preset(add=(_KEY + "={checkpoint}",), keys=(_KEY,))
    cli = "fit" in program(command, site.working_directory).arguments or command_line.has_flag(command, (_FLAG,))
    return Preset(
        add=(_FLAG, "{checkpoint}") if cli else None,
        flags=(_FLAG,),
        ask="Lightning is a library, so podwatch cannot know how the script passes ckpt_path to fit()",
        example=f'["{_FLAG}", "{{checkpoint}}"]',
    )


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    flag = command_line.flag_value(command, ("--trainer.max_steps", "--max_steps"))
    return command_line.positive(flag or command_line.key_value(command, ("trainer.max_steps",)))


RULES = Rules(
    name="lightning",
    step=_NAME,
    directory="step={step}.ckpt",
    judge=judge,
    preset=_preset,
    sources=(
        Source("Lightning-AI/pytorch-lightning", "src/lightning/pytorch/callbacks/model_checkpoint.py", _COMMIT),
        Source("Lightning-AI/pytorch-lightning", "src/lightning/fabric/utilities/cloud_io.py", _COMMIT),
        Source("Lightning-AI/pytorch-lightning", "src/lightning/pytorch/strategies/fsdp.py", _COMMIT),
        Source("Lightning-AI/pytorch-lightning", "src/lightning/pytorch/strategies/deepspeed.py", _COMMIT),
    ),
    # Files and DCP directories load with any world size; DeepSpeed ones do not, and only they report a size.
    reshards=False,
    target=_target,
    finish_lines=("`Trainer.fit` stopped:",),
)


def make(site: Site) -> Layout:
    return Lightning(site)


def recognise(site: Site) -> Recognition | None:
    layout = Lightning(site)
    for entries in list(layout.find().values())[-3:]:
        return Recognition("lightning", f"{entries[0].name} exists", certain=True)
    if any((site.output_dir / name).is_dir() for name in ("lightning_logs",)):
        return Recognition("lightning", "lightning_logs exists")
    return None


LOG = TrainerLog(
    # Sanity check and validation have bars too, without v_num.
    epoch_bars=(EpochBar(re.compile(r"Epoch (\d{1,9})"), needs="v_num="),),
    # rich's bar; it has at least one full cell
    epoch_lines=(re.compile(r"^Epoch (?=.*━)(\d{1,9})/-?\d{1,9}\s+[━╸╺ ]*\s(\d{1,12})/(\d{1,12}) \d+:\d\d:\d\d • "),),
)

WEIGHTS = Weights(note="the state of the script's LightningModule: its own code exports the model")

KIND = Kind("lightning", make, recognise, log=LOG, weights=WEIGHTS)
