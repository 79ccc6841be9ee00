"""SkyRL: ``global_step_N`` with ``policy/``, perhaps ``critic/``, ``data.pt`` and ``trainer_state.pt``.

Order: policy, critic, data.pt, trainer_state.pt, then ``latest_ckpt_global_step.txt`` in the parent; the fully
asynchronous trainer writes ``fully_async_state.pt`` after that, and cannot load without it. A role is either FSDP (one
model, optim and extra_state file per rank: the world size is fixed) or a Megatron distributed checkpoint, which can be
finished after the tracker. SkyRL only logs a failed save of data.pt, so it is not required. output_dir is
``trainer.ckpt_path`` (``ckpt_path`` of the SFT trainer).
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from podwatch.checkpoints.formats import dcp
from podwatch.checkpoints.layouts import command_line, shared_rules, step_dirs
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
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, inside_output, step_names

STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,17})$")
TRACKER = "latest_ckpt_global_step.txt"
STATE = "trainer_state.pt"
ASYNC = "fully_async_state.pt"
_KINDS = ("model", "optim", "extra_state")
_SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_COMMIT = "a9564572eb8e91076be43c1bd5e4615e3de17265"
_SFT_KEYS = ("resume_from",)
_RL_KEYS = ("trainer.resume_mode", "trainer.resume_path")


def judge(view: StepView, *, fully_async: bool, late: bool) -> Judgement:
    """``fully_async``: the command runs that trainer; other steps show it too. ``late``: Megatron writes in the
    background, so its index can be newer than everything else."""
    inside, siblings = view.only, view.siblings()
    inside.require(STATE, why="it is written after the models")
    data = r"(?:policy|critic)/.*_rank_\d+\.pt|data\.pt"
    inside.written_last(STATE, data if late else rf"{data}|(?:policy|critic)/(?:.*/)?\.metadata")
    if not inside.below("critic").files and any((s / "critic").is_dir() for s in siblings):
        raise inside.fault("critic is missing")
    worlds, tokens, leftovers = set[int](), list[str](), list[str]()
    for name in ("policy", "critic"):
        role = inside.below(name)
        if not role.files and name == "critic":
            continue
        if role.matches(_SHARD):
            worlds.add(_fsdp(role))
        else:
            token, left = step_dirs.check(role)
            if not token:
                raise role.fault("it contains neither FSDP files nor a distributed checkpoint")
            tokens.append(token)
            leftovers.extend(left)
    inside.sound()
    recorded = inside.number(STATE, "global_step")
    if recorded not in (None, view.step):
        raise inside.fault(f"{STATE} contains step {recorded}, not {view.step}", damaged=True)
    shared_rules.reached(view.root / TRACKER, view.step, inside, later=shared_rules.has_later(view, STEP))
    if fully_async or ASYNC in inside.files or any((s / ASYNC).exists() for s in siblings):
        _asynchronous(inside)
    return Judgement(
        True,
        marker=Marker.LAST_FILE,
        save_token="-".join(tokens),
        world_size=max(worlds, default=None),
        leftovers=tuple(leftovers),
    )


def _fsdp(role: Inside) -> int:
    role.require("fsdp_config.json", why="rank 0 writes it when its own files are done")
    config = role.json("fsdp_config.json")
    world = config.get("world_size") if isinstance(config, dict) else None
    sizes = {int(m.group(2)) for m in role.matches(_SHARD)}
    if not isinstance(world, int) or sizes != {world}:
        raise role.fault(f"files of {' and '.join(map(str, sorted(sizes)))} ranks, not of {world}", damaged=True)
    for kind in _KINDS:
        role.ranks(rf"{kind}_world_size_{world}_rank_(\d+)\.pt", world, kind)
    return world


def _asynchronous(inside: Inside) -> None:
    """The file is written after the tracker, so an old one of the same step must not count."""
    inside.require(ASYNC, why="the fully asynchronous trainer writes it last and cannot load without it")
    if inside.files[ASYNC].mtime_ns + dcp.MTIME_TOLERANCE_NS < inside.files[STATE].mtime_ns:
        raise inside.fault(f"{ASYNC} is older than {STATE}: it belongs to an earlier save")


def _trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    return shared_rules.as_number(root / TRACKER, step)


def _pinned(root: Path) -> Mapping[int, str]:
    return shared_rules.pinned(root / TRACKER)


def _is_sft(site: Site) -> bool:
    seen = program(site.command, site.working_directory)
    return "sft" in f"{seen.module} {seen.script}" or bool(re.search(r"-m[ =]+\S*sft", seen.shell))


def _is_async(site: Site) -> bool:
    seen = program(site.command, site.working_directory)
    return "fully_async" in f"{seen.module} {seen.script}" or "fully_async" in seen.shell


def _saves_late(command: Sequence[str]) -> bool:
    found = [a.partition("=") for a in command]
    return any(n.endswith("async_dist_ckpt_save") and v.lower() == "true" for n, _, v in found)


def _preset(site: Site, command: Sequence[str]) -> Preset:
    if _is_sft(site) or command_line.key_value(command, _SFT_KEYS) is not None:
        return Preset(add=("resume_from={checkpoint}",), keys=_SFT_KEYS)
    return Preset(
        add=("trainer.resume_mode=from_path", "trainer.resume_path={checkpoint}"),
        keys=_RL_KEYS,
    )


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(
        command_line.key_value(command, ("trainer.max_training_steps", "max_training_steps", "num_steps"))
    )


def _root(site: Site) -> Path:
    named = command_line.key_value(site.command, ("trainer.ckpt_path", "ckpt_path"))
    return inside_output(site, None if named is None or "$" in named else named)


def rules(site: Site) -> Rules:
    return Rules(
        name="skyrl",
        step=STEP,
        directory="global_step_{step}",
        judge=partial(judge, fully_async=_is_async(site), late=_saves_late(site.command)),
        preset=_preset,
        sources=(
            Source("NovaSky-AI/SkyRL", "skyrl/train/trainer.py", _COMMIT),
            Source("NovaSky-AI/SkyRL", "skyrl/train/fully_async_trainer.py", _COMMIT),
            Source("NovaSky-AI/SkyRL", "skyrl/backends/skyrl_train/distributed/fsdp_strategy.py", _COMMIT),
            Source("NovaSky-AI/SkyRL", "skyrl/train/sft_trainer.py", _COMMIT),
        ),
        # FSDP files load only with the same world size; Megatron checkpoints report no size, so nothing is compared.
        reshards=False,
        root=_root,
        rests_on=lambda root: (root / TRACKER,),
        trackers=_trackers,
        pinned=_pinned,
        # eval_before_train reports under the loaded step.
        first_after=0,
        target=_target,
        told_by=STATE,
    )


def make(site: Site) -> Layout:
    return StepDirs(site, rules(site))


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("skyrl", "skyrl_train")
    if module:
        return Recognition("skyrl", f"the command runs {module}", certain=True)
    root = _root(site)
    if (root / TRACKER).is_file() and step_names(root, STEP):
        return Recognition("skyrl", f"{TRACKER} exists", certain=True)
    return None


WEIGHTS = Weights(
    note="`trainer.hf_save_interval` exports to `trainer.export_path`/global_step_N/policy, outside the checkpoint"
)

KIND = Kind("skyrl", make, recognise, weights=WEIGHTS)
