"""NeMo 2: ``checkpoints/<name>-step=S[-consumed_samples=C][-last]`` with ``weights/`` and ``context/``.

Rank 0 creates ``<name>-unfinished`` beside it before the first byte and removes it after the last, with barriers; the
same marker exists while a checkpoint is being deleted. AutoResume takes the newest ``*-last``; ``*-end`` is the export
at the end, without optimizer by default, and stops the next start.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Weights
from podwatch.checkpoints.layouts.command_line import program
from podwatch.checkpoints.layouts.megatron import torch_dist
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, all_step_names

STEP = re.compile(r"(?:.*[-_.])?step=([0-9]{1,18})(?:[-_.](?!end$).*)?(?<!-end)(?<!-unfinished)(?<!\.ckpt)")
_EXPORT = re.compile(r"(?:.*[-_.])?step=([0-9]{1,18})(?:[-_.].*)?-end")
_MARK = "-unfinished"


def _marker(view: StepView) -> Path:
    return view.root / (view.only.path.name + _MARK)


def judge(view: StepView) -> Judgement:
    inside = view.only
    if _marker(view).exists():
        raise inside.fault(
            f"{_marker(view).name} exists: the checkpoint is being written or removed, or that was interrupted"
        )
    weights = inside.below("weights")
    if not weights.files:
        raise inside.fault("weights is missing")
    verdict = torch_dist(weights)
    if any((s / "context").is_dir() for s in view.siblings()) and not inside.below("context").files:
        raise inside.fault("context is missing, which the other steps have")
    inside.sound()
    return Judgement(
        True,
        marker=Marker.COMMIT,
        save_token=verdict.save_id,
        world_size=verdict.world_size,
        leftovers=tuple(f"{inside.part}/weights/{n}" for n in verdict.leftovers),
    )


def _prefer(names: Sequence[str]) -> str:
    """Prefer ``*-last``: AutoResume reads only these."""
    return min(names, key=lambda n: (not n.endswith("-last"), n))


def _also_ahead(root: Path, step: int | None) -> tuple[Path, ...]:
    """Markers without a checkpoint, and the export of a later end: NeMo refuses to start beside them."""
    limit = -1 if step is None else step
    found = [root / name for n, names in all_step_names(root, _EXPORT).items() if n > limit for name in names]
    try:
        marks = sorted(p for p in root.iterdir() if p.name.endswith(_MARK))
    except (FileNotFoundError, NotADirectoryError):
        return tuple(found)
    for mark in marks:
        match = STEP.fullmatch(mark.name.removesuffix(_MARK))
        if match is not None and int(match.group(1)) > limit:
            found.append(mark)
    return tuple(found)


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=None,
        ask="NeMo 2 programs choose in Python how to resume, so podwatch does not know an argument for it",
        example='["resume.resume_from_path={checkpoint}"] for NeMo-Run, or to "none" with AutoResume, which takes'
        " the newest *-last (podwatch moves everything newer than the chosen step to quarantine)",
    )


RULES = Rules(
    name="nemo",
    step=STEP,
    directory="step={step}-last",
    judge=judge,
    preset=_preset,
    sources=(
        Source("NVIDIA-NeMo/NeMo", "nemo/lightning/pytorch/callbacks/model_checkpoint.py", "8cfedd720"),
        Source("NVIDIA-NeMo/NeMo", "nemo/lightning/resume.py", "8cfedd720"),
    ),
    reshards=True,
    root=lambda site: site.checkpoint_dir or site.output_dir / "checkpoints",
    prefer=_prefer,
    rests_on_beside=lambda view: (_marker(view),),
    also_ahead=_also_ahead,
)


def recognise(site: Site) -> Recognition | None:
    root = RULES.root(site)
    for names in all_step_names(root, STEP).values():
        if (root / names[0] / "weights").is_dir():
            return Recognition("nemo", f"checkpoints/{names[0]} contains weights/", certain=True)
    seen = program(site.command, site.working_directory)
    if seen.name == "nemo" and seen.arguments[:1] in (("llm",), ("vlm",), ("multimodal",)):
        return Recognition("nemo", f"the command runs nemo {seen.arguments[0]}", certain=True)
    return None


WEIGHTS = Weights(
    convert='python -c \'from nemo.collections import llm; llm.export_ckpt(path="CHECKPOINT", target="hf",'
    ' output_path="TARGET")\'',
    note="for the architectures that NeMo can export",
)

KIND = Kind("nemo", lambda site: StepDirs(site, RULES), recognise, weights=WEIGHTS)
