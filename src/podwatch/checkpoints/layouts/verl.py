"""verl: ``global_step_N`` with ``actor/``, perhaps ``critic/``, and ``data.pt``; SFT writes the files right into it.

Four forms of a role: FSDP (one model, optim and extra_state file per rank), Megatron until 2026-06 (``dist_ckpt/``),
Megatron since (``ckpt_contents.json`` written last), Automodel (``model/shard-*.safetensors``, then the DCP directory
``optim/``). The torchtitan engine writes one DCP directory ``step-N`` in the place of ``actor``.
``latest_checkpointed_iteration.txt`` in the parent follows all of them; with async_save each role's finalizer writes
it. verl prunes ``actor`` and ``critic`` only, so ``data.pt`` remains: such a directory is no checkpoint. The world size
of FSDP files is fixed.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from podwatch.checkpoints.formats import dcp
from podwatch.checkpoints.layouts import command_line, shared_rules
from podwatch.checkpoints.layouts.base import Judgement, Kind, Marker, Recognition, Site, Source, Tracker, Weights
from podwatch.checkpoints.layouts.command_line import launched, program
from podwatch.checkpoints.layouts.megatron import torch_dist
from podwatch.checkpoints.layouts.resume_flags import Preset
from podwatch.checkpoints.layouts.shared_rules import Inside, StepView
from podwatch.checkpoints.layouts.step_dirs import Rules, StepDirs, inside_output, step_names
from podwatch.domain.trainer_log import StepPattern, TrainerLog

STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")
TRACKER = "latest_checkpointed_iteration.txt"
_SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
_AUTOMODEL = re.compile(r"model/shard-\d+-model-\d+-of-\d+\.safetensors")
"""One file per rank that has something to write, by torch's writer for the Hugging Face format."""
_OPTIM = "optim"
_KINDS = ("model", "optim", "extra_state")
_CONTENTS = "ckpt_contents.json"
_ROLES = ("actor", "critic")
_DATA = "data.pt"
_EXPORT = "huggingface"
"""verl puts a config and a tokenizer there; operators let its merger add the weights long after the save."""
_SPOKEN_FOR = rf"(?:actor|critic)/(?!{_EXPORT}/).*\.(?:pt|distcp|json|metadata)"
_RESUME = ("trainer.resume_mode", "trainer.resume_from_path")


def judge(view: StepView) -> Judgement:
    inside = view.only
    titan = inside.below(f"step-{view.step}")
    if titan.files and not inside.below("actor").files:
        return _titan(view, inside, titan)
    roles = {r: inside.below(r) for r in _ROLES if inside.below(r).files}
    direct = not roles and (inside.matches(_SHARD) or _CONTENTS in inside.files or _is_automodel(inside))
    if not roles and not direct:
        if _DATA in inside.files:
            raise inside.fault("only data.pt is there: verl has removed the model (or has not written it yet)")
        raise inside.fault("actor is missing")
    siblings = view.siblings()
    if not direct:
        missing = [r for r in _ROLES if r not in roles and (r == "actor" or any((s / r).is_dir() for s in siblings))]
        if missing:
            raise inside.fault(f"{missing[0]} is missing")
        inside.written_last(_DATA, _SPOKEN_FOR)
    else:
        _sft_data(inside, siblings)
    shared_rules.reached(view.root / TRACKER, view.step, inside, later=shared_rules.has_later(view, STEP))
    worlds, tokens, leftovers = [], list[str](), list[str]()
    for name, role in roles.items() if roles else (("", inside),):
        world = _fsdp(role, [s / name for s in siblings]) if role.matches(_SHARD) else None
        if world is None and _is_automodel(role):
            token, left = _automodel(role)
            tokens.append(token)
            leftovers.extend(left)
        elif world is None:
            for folder, verdict in _megatron(role, view.step):
                tokens.append(verdict[0])
                leftovers.extend(f"{role.part}/{role.prefix}{folder}/{n}" for n in verdict[1])
        else:
            worlds.append(world)
    inside.sound()
    return Judgement(
        True,
        marker=Marker.LAST_FILE,
        save_token="-".join(tokens),
        world_size=max(worlds, default=None),
        leftovers=tuple(leftovers),
    )


def _titan(view: StepView, inside: Inside, titan: Inside) -> Judgement:
    """The torchtitan engine overrides its checkpointer's folder by the parent of ``actor``: the DCP rule, then
    ``data.pt`` and the tracker as always."""
    verdict = dcp.check(titan.path, {n: dcp.Shard(f.size, f.mtime_ns) for n, f in titan.files.items()})
    if not verdict.whole:
        raise titan.fault(verdict.reason, damaged=verdict.damaged)
    inside.written_last(_DATA, rf"step-{view.step}/.*\.(?:distcp|metadata)")
    shared_rules.reached(view.root / TRACKER, view.step, inside, later=shared_rules.has_later(view, STEP))
    inside.sound()
    leftovers = tuple(f"{titan.part}/{titan.prefix}{n}" for n in verdict.leftovers)
    return Judgement(True, marker=Marker.LAST_FILE, save_token=verdict.save_id, leftovers=leftovers)


def _sft_data(inside: Inside, siblings: Sequence[Path]) -> None:
    """Require as many files as other steps have: each data-parallel rank writes its own, the last ones perhaps after
    the tracker."""
    here = inside.names(r"data(?:_\d+)?\.pt")
    if not here:
        raise inside.fault("data_0.pt is missing")
    for name in here:
        inside.written_last(name, r"(?!data).*\.(?:pt|distcp|metadata)")
    for sibling in siblings:
        theirs = len([p for p in sibling.glob("data*.pt") if re.fullmatch(r"data(?:_\d+)?\.pt", p.name)])
        if theirs > len(here):
            raise inside.fault(f"{len(here)} of {theirs} dataloader states that {sibling.name} has")


def _fsdp(role: Inside, siblings: Sequence[Path]) -> int:
    """Require model, optimizer and extra state of every rank. A run that never saves its optimizer is recognized by its
    other saves; ``fsdp_config.json`` exists since 2025."""
    shards = role.matches(_SHARD)
    world = 0
    if "fsdp_config.json" in role.files:
        config = role.json("fsdp_config.json")
        world = config.get("world_size", 0) if isinstance(config, dict) else 0
    sizes = {int(m.group(2)) for m in shards}
    if not isinstance(world, int) or world <= 0:
        world = max(sizes)
    if sizes != {world}:
        raise role.fault(f"files of {' and '.join(map(str, sorted(sizes | {world})))} ranks are mixed", damaged=True)
    for kind in _KINDS:
        found = {int(m.group(3)) for m in shards if m.group(1) == kind}
        if not found and kind != "model" and siblings and not any(_saves(s, kind) for s in siblings):
            continue
        gone = set(range(world)) - found
        if gone:
            raise role.fault(f"{kind}_world_size_{world}_rank_{min(gone)}.pt is missing")
    return world


def _saves(directory: Path, kind: str) -> bool:
    return any(directory.glob(f"{kind}_world_size_*_rank_*.pt"))


def _is_automodel(role: Inside) -> bool:
    return _CONTENTS not in role.files and bool(role.matches(_AUTOMODEL) or role.below(_OPTIM).files)


def _automodel(role: Inside) -> tuple[str, tuple[str, ...]]:
    """(save id, leftovers). All ranks write the model before any of them starts with the optimizer, so the index of
    ``optim`` completes both. ``consolidated`` is an export that no resume reads; it can be created again."""
    index = f"{_OPTIM}/{dcp.INDEX}"
    if not role.names(_AUTOMODEL):
        raise role.fault("no model/shard-*.safetensors")
    role.written_last(index, rf"model/\.hf_metadata/.*|{_AUTOMODEL.pattern}")
    role.below("model").sound()
    optim = role.below(_OPTIM)
    verdict = optim.dcp()
    return verdict.save_id, tuple(f"{optim.part}/{optim.prefix}{n}" for n in verdict.leftovers)


def _megatron(role: Inside, step: int) -> list[tuple[str, tuple[str, tuple[str, ...]]]]:
    """(directory, (save id, leftovers)) of every distributed checkpoint of the role."""
    wanted = [f for f in sorted({n.rpartition("/")[0] for n in role.files}) if re.fullmatch(r"(?:.*/)?dist_ckpt", f)]
    if _CONTENTS in role.files:
        contents = role.json(_CONTENTS)
        if not isinstance(contents, dict) or contents.get("global_step") != step:
            raise role.fault(f"{_CONTENTS} does not belong to step {step}: it is from an earlier save")
        role.written_last(_CONTENTS, r".*" if _is_model(contents, _EXPORT) else rf"(?!{_EXPORT}/).*")
        listed = contents.get("directories")
        named = [d for d in listed if isinstance(d, str)] if isinstance(listed, dict) else []
        for directory in named:
            if not role.below(directory).files:
                raise role.fault(f"{directory} is missing, which {_CONTENTS} lists")
            exported = directory.endswith(_EXPORT) and _is_model(contents, directory)
            if exported and not role.below(directory).hf_weights():
                raise role.fault(f"{directory} contains no weights, which {_CONTENTS} lists")
    elif re.search(r"(?:^|\n)(?:model|optimizer|extra)/", "\n".join(role.files)):
        raise role.fault(f"{_CONTENTS} is missing: it is written last")
    if not wanted and _CONTENTS not in role.files:
        raise role.fault("it contains neither FSDP files nor dist_ckpt")
    found = []
    for folder in wanted:
        verdict = torch_dist(role.below(folder))
        found.append((folder, (verdict.save_id, verdict.leftovers)))
    return found


def _is_model(contents: Mapping[str, object], directory: str) -> bool:
    """Whether these are the weights that a resume loads."""
    listed = contents.get("contents")
    model = listed.get("model") if isinstance(listed, dict) else None
    return isinstance(model, dict) and model.get("path") == directory


def _root(site: Site) -> Path:
    named = command_line.key_value(site.command, ("trainer.default_local_dir",))
    if named is None:
        project = command_line.key_value(site.command, ("trainer.project_name",))
        experiment = command_line.key_value(site.command, ("trainer.experiment_name",))
        named = f"checkpoints/{project}/{experiment}" if project and experiment else None
    return inside_output(site, None if named is None or "$" in named else named)


def _preset(_site: Site, _command: Sequence[str]) -> Preset:
    return Preset(
        add=("trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}"),
        keys=_RESUME,
        example='["trainer.resume_mode=resume_path", "trainer.resume_from_path={checkpoint}"]',
    )


def _trackers(root: Path, step: int | None) -> tuple[Tracker, ...]:
    """The tracker. Needed even with resume_path: verl reads it first, and fails if it is garbled."""
    return shared_rules.as_number(root / TRACKER, step)


def _pinned(root: Path) -> Mapping[int, str]:
    return shared_rules.pinned(root / TRACKER)


def _target(_site: Site, command: Sequence[str], _root: Path) -> int | None:
    return command_line.positive(command_line.key_value(command, ("trainer.total_training_steps",)))


def _processes(command: Sequence[str]) -> int | None:
    """PPO's own numbers, else those of SFT's launcher. A config file that the command names can set the number of
    nodes."""
    each, nodes = (command_line.key_value(command, (key,)) for key in ("trainer.n_gpus_per_node", "trainer.nnodes"))
    if each is None:
        return launched(command)
    if nodes is None and any(a.startswith("--config") for a in command):
        return None
    gpus, count = command_line.positive(each), command_line.positive(nodes if nodes is not None else "1")
    return gpus * count if gpus is not None and count is not None else None


RULES = Rules(
    name="verl",
    step=STEP,
    directory="global_step_{step}",
    judge=judge,
    preset=_preset,
    sources=(
        Source("verl-project/verl", "verl/trainer/ppo/ray_trainer.py", "1dda039b9"),
        Source("verl-project/verl", "verl/utils/checkpoint/fsdp_checkpoint_manager.py", "1dda039b9"),
        Source("verl-project/verl", "verl/utils/checkpoint/megatron_checkpoint_manager.py", "1dda039b9"),
        Source("verl-project/verl", "verl/utils/checkpoint/checkpoint_handler.py", "1dda039b9"),
        Source("verl-project/verl", "verl/workers/engine/automodel/transformer_impl.py", "1dda039b9"),
        Source("NVIDIA-NeMo/Automodel", "nemo_automodel/components/checkpoint/checkpointing.py", "9e9472fa3"),
    ),
    reshards=False,
    processes=_processes,
    counts_all=True,
    root=_root,
    rests_on=lambda root: (root / TRACKER,),
    trackers=_trackers,
    pinned=_pinned,
    # trainer.val_before_train reports its validation under the loaded step.
    first_after=0,
    target=_target,
    finish_lines=("Final validation metrics",),
)


def recognise(site: Site) -> Recognition | None:
    seen = program(site.command, site.working_directory)
    module = seen.runs("verl.trainer", "verl.experimental")
    if module:
        return Recognition("verl", f"the command runs {module}", certain=True)
    root = _root(site)
    for name in step_names(root, STEP).values():
        if (root / TRACKER).is_file():
            return Recognition("verl", f"{name} is beside {TRACKER}", certain=True)
        if (root / name / "actor").is_dir():
            return Recognition("verl", f"{name} contains actor/")
    told = seen.says("actor_rollout_ref.")
    return Recognition("verl", f"the command sets {told}*", certain=True) if told else None


LOG = TrainerLog(
    steps=(
        # The line of step 0, and those with validation's metrics alone, report no training.
        StepPattern(
            re.compile(r"^step:(?!0 - )(\d{1,12}) - "),
            also=re.compile(r" - (?:actor|critic|training|train|perf|timing_s|global_seqlen|response_length)[/(]"),
        ),
    ),
    run_bars=("training progress",),
    # verl/trainer/ppo/metric_utils.py, verl/workers/actor/dp_actor.py
    metrics={
        "reward": ("critic/rewards/mean", "critic/score/mean"),
        "entropy": ("actor/entropy", "actor/entropy_loss"),
        "kl": ("actor/ppo_kl", "actor/kl_loss"),  # against the policy that made the rollouts; against the reference
        "grad_norm": ("actor/grad_norm",),
        "loss": ("actor/pg_loss",),
    },
)

WEIGHTS = Weights(
    ("actor/huggingface",),
    when="`hf_model` is in the trainer's save_contents; otherwise config and tokenizer only",
    convert="python -m verl.model_merger merge --backend fsdp --local_dir CHECKPOINT/actor --target_dir TARGET",
    note="`--backend megatron` for Megatron; SFT: CHECKPOINT itself",
)

KIND = Kind("verl", lambda site: StepDirs(site, RULES), recognise, log=LOG, weights=WEIGHTS)
