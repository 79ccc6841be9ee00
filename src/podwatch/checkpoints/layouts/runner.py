"""The 2025 RL runner: ``training_state/step_N/{model/,optimizer.pt,scheduler.pt,training_info.json}`` with the symlink
``step_latest``.

The order of its writes is unknown and nothing marks the end, so all files must exist, be sound, and be unchanged for
the long settle time; ``training_info.json`` must contain the step of the directory. The symlink is only a hint.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import command_line, shared_rules
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Tracker, Weights
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import STEP, Rules, StepDirs, step_names

INFO = "training_info.json"
LINK = "step_latest"
_KEYS = ("step", "global_step", "current_step", "training_step")
_FROM = "--from-step"


def judge(view: StepView) -> Judgement:
    inside = view.only
    inside.require("optimizer.pt", "scheduler.pt", INFO)
    model = inside.below("model")
    if not model.hf_weights():
        raise inside.fault("the weights in model/ are missing")
    info = inside.json(INFO)
    recorded = next((info[k] for k in _KEYS if k in info), None) if isinstance(info, dict) else None
    if recorded is None:
        raise inside.fault(f"{INFO} names no step", damaged=True)
    if recorded != view.step:
        raise inside.fault(f"{INFO} contains step {recorded}, not {view.step}", damaged=True)
    inside.sound()
    if inside.has_holes():
        raise inside.fault("a file has ranges that were never written")
    return Judgement(True, marker=Marker.NONE)


def root_of(site: Site) -> Path:
    """The directory of the steps; output_dir can be ``training_state`` itself."""
    if site.checkpoint_dir is not None:
        return site.checkpoint_dir
    return site.output_dir if site.output_dir.name == "training_state" else site.output_dir / "training_state"


def _trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    """Created again where it is missing: without ``--from-step`` the runner follows it."""
    return () if step is None else (Tracker(root / LINK, target=f"step_{step}"),)


def _pinned(root: Path) -> Mapping[int, str]:
    match = STEP.match(shared_rules.link_target(root / LINK))
    return {int(match.group(1)): LINK} if match else {}


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(add=(_FROM, "{step}"), flags=(_FROM,))


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.flag_value(command, ("--max-steps", "--num-steps")))


RULES = Rules(
    name="runner",
    step=STEP,
    directory="step_{step}",
    judge=judge,
    preset=_preset,
    sources=(Source("the 2025 runner", "its files on disk", "not public"),),
    reshards=True,
    root=root_of,
    trackers=_trackers,
    pinned=_pinned,
    target=_target,
    told_by=INFO,
)


def recognise(site: Site) -> Recognition | None:
    root = root_of(site)
    for step, name in sorted(step_names(root).items(), reverse=True)[:3]:
        if (root / name / INFO).is_file() and (root / name / "model").is_dir():
            return Recognition("runner", f"{root.name}/step_{step} contains model/ and {INFO}", certain=True)
    return None


WEIGHTS = Weights(("model",))

KIND = Kind("runner", lambda site: StepDirs(site, RULES), recognise, weights=WEIGHTS)
