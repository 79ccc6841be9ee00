"""Plain ``torch.distributed.checkpoint``: step directories of any name that ends with its number, each a DCP directory
or holding some (``model/``, ``optimizer/``).

``.metadata`` is renamed into place when every rank is done. Nothing shows which of several DCP directories in one step
is written last, so the step is compared with other steps and the settle time is long.
"""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from podwatch.checkpoints.formats import dcp
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Weights
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, all_step_names, is_plain_dir
from podwatch.checkpoints.scan import MAX_DEPTH

STEP = re.compile(r"(?:[A-Za-z][A-Za-z0-9]*[-_=])*([0-9]{1,18})")


def judge(view: StepView) -> Judgement:
    inside = view.only
    root = inside.path.parent
    view.alone(n for n in all_step_names(root, STEP).get(view.step, ()) if _belongs(root / n))
    folders = sorted({n.rpartition("/")[0] for n in inside.files if _is_dcp(n.rpartition("/")[2])})
    if not folders:
        raise inside.fault(f"no {dcp.INDEX} and no shard yet")
    for sibling in view.siblings():
        for name in sorted(_indexed(str(sibling))):
            if name not in folders:
                raise inside.fault(f"{name or 'its own index'} is missing, which {sibling.name} has")
    tokens, leftovers, world = [], list[str](), None
    for folder in folders:
        here = inside.below(folder) if folder else inside
        verdict = here.dcp()
        tokens.append(verdict.save_id)
        leftovers.extend(f"{inside.part}/{here.prefix}{n}" for n in verdict.leftovers)
        world = world or verdict.world_size
    inside.sound()
    alone = folders == [""] and all(_is_dcp(n) for n in inside.files)
    return Judgement(
        True,
        marker=Marker.COMMIT if alone else Marker.NONE,
        save_token="-".join(tokens),
        world_size=world,
        leftovers=tuple(leftovers),
    )


def _indexed(directory: str, inside: str = "", depth: int = 0) -> Iterator[str]:
    """Every directory below, by its relative path, that has an index; as deep as a scan reads."""
    try:
        with os.scandir(directory) as entries:
            listed = list(entries)
        if any(entry.name == dcp.INDEX for entry in listed):
            yield inside
        for entry in listed if depth < MAX_DEPTH else ():
            if entry.is_dir(follow_symlinks=False):
                yield from _indexed(entry.path, f"{inside}/{entry.name}" if inside else entry.name, depth + 1)
    except OSError:
        return


def _belongs(directory: Path) -> bool:
    """Whether it is a step: any name can end in a number, but a step has an index or a shard in it, or one level
    below."""
    try:
        for entry in directory.iterdir():
            if _is_dcp(entry.name):
                return True
            if is_plain_dir(entry) and any(_is_dcp(inner.name) for inner in entry.iterdir()):
                return True
    except OSError:
        return False
    return False


def _is_dcp(name: str) -> bool:
    return name in (dcp.INDEX, dcp.INDEX_TMP) or dcp.is_shard(name)


def _directory(root: Path, step: int) -> str:
    """The name of a step, padded like the other names."""
    for number, names in sorted(all_step_names(root, STEP).items(), reverse=True):
        if not _belongs(root / names[0]):
            continue
        match = STEP.fullmatch(names[0])
        if match is not None:
            digits = match.group(1)
            width = len(digits) if digits != str(number) else 0
            return f"{names[0][: match.start(1)]}{step:0{width}d}"
    return f"step_{step}"


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=None, ask="podwatch does not know how a trainer with plain DCP checkpoints resumes")


RULES = Rules(
    name="dcp",
    step=STEP,
    directory=_directory,
    judge=judge,
    preset=_preset,
    sources=(Source("pytorch/pytorch", "torch/distributed/checkpoint/filesystem.py", "2.13.0"),),
    reshards=True,
    belongs=_belongs,
)


def recognise(site: Site) -> Recognition | None:
    root = site.checkpoint_dir or site.output_dir
    for _, names in sorted(all_step_names(root, STEP).items(), reverse=True)[:3]:
        for folder in (root / names[0], *sorted(p for p in (root / names[0]).iterdir() if is_plain_dir(p))):
            if (folder / dcp.INDEX).is_file() and any(folder.glob("__*.distcp")):
                return Recognition("dcp", f"{folder.relative_to(root)} is a DCP directory")
    return None


WEIGHTS = Weights(
    note="`python -m torch.distributed.checkpoint.format_utils dcp_to_torch CHECKPOINT FILE` makes one torch file,"
    " which needs the script's model class"
)

KIND = Kind("dcp", lambda site: StepDirs(site, RULES), recognise, weights=WEIGHTS)
