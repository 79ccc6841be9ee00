"""OpenRLHF's PPO and its kin: ``<ckpt.path>/_actor/<tag>`` and ``_critic/<tag>``, each as DeepSpeed saves it.

output_dir is ``ckpt.path``. Both roles save in parallel, each with a ``latest`` of its own, so after a crash they can
name different steps: both must have reached N, and before a start podwatch writes N into both. The number is the
trainer's global step, which is also in the actor's states. ``best_global_stepM`` tags and ``<tag>_hf`` exports are
never resume points. Its SFT, DPO and reward trainers keep plain DeepSpeed directories: layout ``deepspeed``.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from podwatch.checkpoints.layouts import command_line, deepspeed, shared_rules
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
from podwatch.checkpoints.layouts.deepspeed import STEP, load_preset
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import StepView
from podwatch.checkpoints.layouts.step_dirs import Part, Rules, StepDirs, is_plain_dir, step_names

PPO_MODULES = ("openrlhf.cli.train_ppo_ray",)
_ROLES = {"actor": "_actor", "critic": "_critic"}
_METRIC = r"metric\.json"
"""Written by rank 0 at the end of the save; the trainer's rotation reads it, a load does not."""
_TAG = re.compile(r"(?:best_)?global_step(0|[1-9][0-9]{0,17})$")
"""A best tag also changes ``latest``."""
_BEST = re.compile(r"best_global_step(0|[1-9][0-9]{0,17})$")
_EXPORT = re.compile(r"(?:best_)?global_step(0|[1-9][0-9]{0,17})_hf$")


def judge(view: StepView, *, critic: bool | None) -> Judgement:
    """``critic``: the command has one, so every save must have it. None: unknown from the command, so a first save
    without one can be waiting for it: the roles save in parallel, each with its own ``latest``."""
    markers, sizes, later = list[Marker](), list[int | None](), shared_rules.has_later(view, STEP)
    for role, inside in view.parts.items():
        folder = view.root / _ROLES[role]
        if not inside.files:
            if role == "critic" and not critic and not step_names(folder, STEP):
                markers += () if critic is False else (Marker.NONE,)
                continue
            raise inside.fault(f"the {role} has not saved this step")
        zero = deepspeed.check(inside)
        inside.sound(but=_METRIC)
        markers.append(deepspeed.over(folder / "latest", view, inside, _TAG, later))
        recorded = zero.number("global_step") if role == "actor" else None
        if recorded not in (None, view.step):
            raise inside.fault(f"its states contain step {recorded}, not {view.step}", damaged=True)
        sizes.append(zero.ranks)
    weak = Marker.NONE in markers or None in sizes
    return Judgement(True, marker=Marker.NONE if weak else Marker.LAST_FILE, world_size=sizes[0])


def _latest(root: Path) -> tuple[Path, ...]:
    return tuple(root / folder / "latest" for folder in _ROLES.values())


def _trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    if step is None:
        return ()
    content = f"global_step{step}".encode()
    return tuple(Tracker(p, content=content) for p in _latest(root) if is_plain_dir(p.parent))


def _pinned(root: Path) -> Mapping[int, str]:
    found: dict[int, str] = {}
    for folder in _ROLES.values():
        step = shared_rules.number(root / folder / "latest", STEP)
        if step is not None:
            found.setdefault(step, f"{folder}/latest")
    return found


def _also_ahead(root: Path, step: int | None) -> tuple[Path, ...]:
    """Best tags and exports of the steps ahead."""
    limit = -1 if step is None else step
    places = [(root / folder, _BEST) for folder in _ROLES.values()]
    return tuple(
        folder / name
        for folder, pattern in (*places, (root, _EXPORT))
        for number, name in sorted(step_names(folder, pattern).items())
        if number > limit
    )


def wants_critic(command: Sequence[str]) -> bool | None:
    """Whether the command saves a critic; None if the command does not show it."""
    estimator = command_line.flag_value(command, ("--algo.advantage.estimator", "--advantage_estimator"))
    if estimator is not None:
        return estimator == "gae"
    return True if command_line.has_flag(command, ("--critic_pretrain",)) else None


def _preset(_site: Site, command: Sequence[str]) -> Preset:
    return load_preset(command)


def _target(_site: Site, _command: Sequence[str], _root: Path) -> int | None:
    """None: the target is in episodes and epochs of a data set of unknown length."""
    return None


def rules(site: Site) -> Rules:
    critic = wants_critic(site.command)
    return Rules(
        name="openrlhf",
        step=STEP,
        directory="global_step{step}",
        judge=partial(judge, critic=critic),
        preset=_preset,
        sources=(
            Source(
                "OpenRLHF/OpenRLHF",
                "openrlhf/utils/deepspeed/deepspeed.py",
                "3c3be6234e0cb353e76bb8019947db9dfe99fca7",
            ),
            Source("OpenRLHF/OpenRLHF", "openrlhf/trainer/ppo_trainer.py", "3c3be6234e0cb353e76bb8019947db9dfe99fca7"),
            deepspeed.SOURCE,
        ),
        reshards=False,
        parts=(Part("actor", beside="_actor"), Part("critic", beside="_critic", if_any=not critic)),
        rests_on=_latest,
        trackers=_trackers,
        pinned=_pinned,
        also_ahead=_also_ahead,
        # The first line after a load from N is that of step N + 1.
        first_after=1,
        target=_target,
    )


def make(site: Site) -> Layout:
    return StepDirs(site, rules(site))


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory).runs(*PPO_MODULES)
    if seen:
        return Recognition("openrlhf", f"the command runs {seen}", certain=True)
    root = site.checkpoint_dir or site.output_dir
    for folder in _ROLES.values():
        for step in step_names(root / folder, STEP):
            return Recognition("openrlhf", f"{folder}/global_step{step} exists", certain=True)
    return None


WEIGHTS = Weights(
    ("../global_step{step}_hf",),
    when="with its option for Hugging Face files",
    convert="python ../zero_to_fp32.py .. TARGET -t global_stepN --safe_serialization",
    note="in _actor/global_stepN; config.json and the tokenizer come from the original model",
)

KIND = Kind("openrlhf", make, recognise, weights=WEIGHTS)
