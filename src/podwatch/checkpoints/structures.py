"""Structures that are recognised by the names of their files, in every trainer's checkpoint, and must be whole.

Pure: the files were read before (inspect_child.py). Each function yields what is wrong with one structure.
"""

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

TOLERANCE_NS = 2_000_000_000
"""How much older a marker can be than what it covers: copies and network file systems round times."""

HOLE_FROM = 64 << 10
"""Bytes. Smaller files have few blocks, and the check of their format sees more."""
FILLED = (".safetensors", ".bin", ".pt")
"""Files that some writers create at full size and fill later."""
_STRUCTURED = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".distcp")


def has_structure(name: str) -> bool:
    """Whether an inspection sees more of a file with this name than its size."""
    return name.endswith(_STRUCTURED) or name.rpartition("/")[2].rpartition(":")[2] in (INDEX, "manifest.ocdbt")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file as it was read. ``problem``: what is broken in its structure. ``unreadable``: why it could not be
    observed. ``has_hole``: a range was never written. ``unsized``: its format does not show whether its end is there.
    ``content``: what its kind holds: JSON, the index of a DCP directory, values of a torch file, a text."""

    size: int
    mtime_ns: int
    problem: str = ""
    unreadable: str = ""
    has_hole: bool = False
    unsized: bool = False
    content: Any = None


Files = Mapping[str, FileFacts]
"""By path below the part, or ``part:path`` where a checkpoint has several parts."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What a checkpoint lacks. ``damaged``: nothing is missing, but a file is broken."""

    reason: str
    damaged: bool = False
    part: str = ""
    """Where ``reason`` does not begin with the part."""


@dataclass(slots=True)
class SaveShape:
    """What the structures show of a save. ``tokens`` identify it from inside, ``unlisted`` are shards that no index
    lists, ``keys`` the names of what was saved. ``fixed_ranks``: numbers of ranks for which files were split;
    ``seen_ranks``: those that wrote something. ``ranks_unknown``: files of the last ranks could be missing
    unnoticed."""

    tokens: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    fixed_ranks: set[int] = field(default_factory=set)
    seen_ranks: set[int] = field(default_factory=set)
    ranks_unknown: bool = False


def matching(names: Iterable[str], globs: Iterable[str]) -> list[str]:
    """Names that match one of the globs, and none of those that begin with ``!``. ``*`` matches ``/`` too."""
    wanted = [g for g in globs if not g.startswith("!")]
    unwanted = [g[1:] for g in globs if g.startswith("!")]
    return sorted(
        n for n in names if any(fnmatchcase(n, g) for g in wanted) and not any(fnmatchcase(n, g) for g in unwanted)
    )


def folders_of(files: Files) -> dict[str, dict[str, str]]:
    """Folder -> file name -> full name. A part counts as a folder."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in sorted(files):
        folder, separator, base = name.rpartition("/")
        if not separator:
            folder, _, base = name.rpartition(":")
        found[folder][base] = name
    return found


def shortfalls(files: Files, shape: SaveShape, config_folders: Iterable[str]) -> Iterator[Shortfall]:
    """Everything that is wrong with the structures. ``config_folders``: globs of folders in which Megatron's
    ``metadata.json`` follows the DCP index. Fills ``shape``."""
    folders = folders_of(files)
    for folder, inside in folders.items():
        yield from _dcp(folder, inside, files, shape, config_folders)
        yield from _weights(folder, inside, files)
        yield from _world_sizes(folder, inside, files, shape)
        yield from _gaps(folder, inside, shape)
    yield from _deepspeed(folders, files, shape)
    yield from _model_parallel(files)
    for name in sorted(files):
        if files[name].problem:
            yield Shortfall(f"{name} {files[name].problem}", damaged=True)


def newer_than(limit_ns: int, names: Iterable[str], files: Files) -> str:
    """The first of the names that was written after the limit; empty if none was."""
    return next((n for n in names if files[n].mtime_ns > limit_ns + TOLERANCE_NS), "")


# -- DCP: ``.metadata`` and its shards -------------------------------------------------------------------------------
# torch writes and syncs every shard, then ``.metadata.tmp``, then removes an old ``.metadata`` and renames. In a
# directory that is written again the old index stays during the whole write: only sizes and times show that.

INDEX = ".metadata"
UNFINISHED_INDEX = INDEX + ".tmp"
_SHARD = re.compile(r"__(\d+)_\d+\.distcp")
_CONFIG = "metadata.json"


def is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def is_dcp(name: str) -> bool:
    return name in (INDEX, UNFINISHED_INDEX) or _SHARD.fullmatch(name) is not None


def _dcp(
    folder: str, inside: Mapping[str, str], files: Files, shape: SaveShape, config_folders: Iterable[str]
) -> Iterator[Shortfall]:
    if not any(is_dcp(base) for base in inside):
        return
    where = f"{folder}: " if folder else ""
    shards = {base: name for base, name in inside.items() if _SHARD.fullmatch(base)}
    if UNFINISHED_INDEX in inside:
        yield Shortfall(f"{where}{UNFINISHED_INDEX} exists: the save has not finished")
        return
    if INDEX not in inside:
        yield Shortfall(f"{where}{INDEX} is missing: the save has not finished")
        return
    index = files[inside[INDEX]]
    if newer := newer_than(index.mtime_ns, shards.values(), files):
        yield Shortfall(f"{newer} is newer than {INDEX}: being overwritten, or an overwrite was interrupted")
    if any(fnmatchcase(folder, glob) for glob in config_folders):
        yield from _dcp_config(where, inside, files)
    if index.problem or not isinstance(index.content, dict):
        return  # the problem is reported with those of all files
    need: Mapping[str, int] = index.content["need"]
    missing = sorted(set(need) - set(inside))
    if missing:
        yield Shortfall(f"{where}{missing[0]} is missing, which {INDEX} lists")
    for base in sorted(set(need) & set(inside)):
        if files[inside[base]].size != need[base]:
            yield Shortfall(
                f"{inside[base]} has {files[inside[base]].size} bytes, {INDEX} requires {need[base]}", damaged=True
            )
    shape.tokens.append(str(index.content["save_id"]))
    shape.keys.update(index.content["keys"])
    shape.seen_ranks.update(int(m[1]) + 1 for m in map(_SHARD.fullmatch, need) if m)
    shape.unlisted.extend(name for base, name in shards.items() if base not in need)


def _dcp_config(where: str, inside: Mapping[str, str], files: Files) -> Iterator[Shortfall]:
    if _CONFIG not in inside:
        yield Shortfall(f"{where}{_CONFIG} is missing: it is written after {INDEX}")
        return
    data = [n for base, n in inside.items() if is_dcp(base) or base == "common.pt"]
    if newer := newer_than(files[inside[_CONFIG]].mtime_ns, data, files):
        yield Shortfall(f"{newer} is newer than {_CONFIG}: being overwritten, or an overwrite was interrupted")


# -- weights in several files ----------------------------------------------------------------------------------------

_NUMBERED_WEIGHTS = re.compile(r"(?:model|pytorch_model)-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")
_INDEX_OF_WEIGHTS = ".index.json"


def _weights(folder: str, inside: Mapping[str, str], files: Files) -> Iterator[Shortfall]:
    where = f"{folder}: " if folder else ""
    indexes = [base for base in inside if base.endswith(_INDEX_OF_WEIGHTS)]
    if not indexes and any(_NUMBERED_WEIGHTS.fullmatch(base) for base in inside):
        yield Shortfall(f"{where}the index of the weights is missing")
    for base in indexes:
        index = files[inside[base]]
        if index.problem or not isinstance(index.content, dict):
            continue
        shards: frozenset[str] = index.content["shards"]
        if missing := sorted(shards - set(inside)):
            yield Shortfall(f"{where}{missing[0]} is missing, which {base} lists")
            continue
        own = [files[inside[shard]] for shard in shards if shard.endswith(".safetensors")]
        headers = [facts.content for facts in own if not facts.problem]
        if len(headers) == len(shards) and all(isinstance(h, frozenset) for h in headers):
            absent = index.content["tensors"] - frozenset().union(*headers)
            if absent:
                yield Shortfall(f"{where}{len(absent)} of the tensors in {base} are in no shard", damaged=True)


# -- one file for each rank ------------------------------------------------------------------------------------------

_OF_WORLD = re.compile(r"(.*?)_world_size_(\d+)_rank_(\d+)(\.\w+)")
_NUMBERED = re.compile(
    r"((?:random_states|rng_state|custom_checkpoint|pytorch_model_fsdp(?:_\d+)?_?rank)_?)(\d+)(\.\w+)"
)
_OPTIONAL_RANKS = "rng_state"
"""The absence of one is only logged by its trainer."""


def _world_sizes(folder: str, inside: Mapping[str, str], files: Files, shape: SaveShape) -> Iterator[Shortfall]:
    """Files whose names hold the number of ranks."""
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for base in inside:
        if match := _OF_WORLD.fullmatch(base):
            ranks[match[1], int(match[2])].add(int(match[3]))
    if not ranks:
        return
    where = f"{folder}: " if folder else ""
    sizes = {size for _, size in ranks}
    config = files[inside["fsdp_config.json"]].content if "fsdp_config.json" in inside else None
    if isinstance(config, dict) and isinstance(config.get("world_size"), int) and config["world_size"] > 0:
        sizes.add(config["world_size"])
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        yield Shortfall(f"{where}files of {listed} ranks are mixed", damaged=True)
    for (kind, size), found in sorted(ranks.items()):
        shape.fixed_ranks.add(size)
        if size > len(found):  # not by range(size): a name can claim billions
            missing = next(rank for rank in range(size) if rank not in found)
            yield Shortfall(f"{where}{kind}_world_size_{size}_rank_{missing} is missing")


def _gaps(folder: str, inside: Mapping[str, str], shape: SaveShape) -> Iterator[Shortfall]:
    """Files numbered from 0."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for base in inside:
        if match := _NUMBERED.fullmatch(base):
            found[match[1], match[3]].add(int(match[2]))
    for (lead, suffix), numbers in sorted(found.items()):
        if lead.startswith(_OPTIONAL_RANKS):
            shape.seen_ranks.add(max(numbers) + 1)
        elif max(numbers) >= len(numbers):
            missing = next(n for n in range(max(numbers)) if n not in numbers)
            yield Shortfall(f"{folder + ': ' if folder else ''}{lead}{missing}{suffix} is missing")


# -- DeepSpeed -------------------------------------------------------------------------------------------------------
# Every rank writes its own model states and optimizer shard, and rank 0 writes ``latest`` before the barrier that ends
# the save, so ``latest`` alone proves nothing. The number of ranks is inside the model states.

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_RANK_ZERO = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_0_)?mp_rank_00_(?:model|optim)_states\.pt")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")


def is_model_states(base: str) -> bool:
    return _MODEL.fullmatch(base) is not None


def _deepspeed(folders: Mapping[str, Mapping[str, str]], files: Files, shape: SaveShape) -> Iterator[Shortfall]:
    for folder, inside in folders.items():
        models = [m for base in inside if (m := _MODEL.fullmatch(base))]
        shards = [m for base in inside if (m := _OPTIM.fullmatch(base))]
        if not models and not shards:
            continue
        where = f"{folder}: " if folder else ""
        if not models:
            yield Shortfall(f"{where}no model states")
            continue
        values = files[inside[models[0].string]].content
        values = values if isinstance(values, dict) else {}
        size = whole_number(values.get("dp_world_size")) or 0
        if size:
            shape.fixed_ranks.add(size)
        shape.ranks_unknown |= not size
        yield from _slices(where, models, shards, values, size)
        yield from _experts(where, inside)
        above = folders.get(posixpath.dirname(folder), {}) if folder else {}
        if "latest" in above:
            yield from _latest(folder, inside, files[above["latest"]], files)
        states = [base for base in above if _RANDOM.fullmatch(base)]
        if states and len(states) < size:
            yield Shortfall(f"the random state of rank {len(states)} is missing")


def _slices(
    where: str, models: list[re.Match[str]], shards: list[re.Match[str]], values: Mapping[str, object], size: int
) -> Iterator[Shortfall]:
    """Every data-parallel rank of every model-parallel one."""
    present = {int(m[2]) for m in (*models, *shards)}
    count = max(whole_number(values.get("mp_world_size")) or 1, max(present) + 1)
    if count > len(present):
        missing = next(n for n in range(count) if n not in present)
        yield Shortfall(f"{where}the states of model-parallel rank {missing} are missing")
        return
    for number in sorted(present):
        own_models = [m for m in models if int(m[2]) == number]
        own_shards = [m for m in shards if int(m[2]) == number]
        if not own_models:
            yield Shortfall(f"{where}the model states of model-parallel rank {number} are missing")
        for kind, found in (("model", own_models), ("optimizer", own_shards)):
            ranks = {int(m[1]) for m in found if m[1] is not None}
            wanted = size or max(ranks, default=-1) + 1
            if ranks and wanted > len(ranks):
                missing = next(n for n in range(wanted) if n not in ranks)
                yield Shortfall(f"{where}the {kind} states of rank {missing} (model-parallel {number}) are missing")
        # Without ZeRO the optimizer is inside the model states; with it there is nothing under that name.
        inside_model = "optimizer#" in values or values.get("ds_config.zero_optimization.stage") == 0
        if not own_shards and (shards or not inside_model):
            yield Shortfall(f"{where}the optimizer states of model-parallel rank {number} are missing")


def _experts(where: str, inside: Iterable[str]) -> Iterator[Shortfall]:
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for base in inside:
        if match := _EXPERT.fullmatch(base):
            found[match[1], match[3]].add(int(match[2]))
    for (layer, _), numbers in sorted(found.items()):
        if max(numbers) >= len(numbers):
            missing = next(n for n in range(max(numbers)) if n not in numbers)
            yield Shortfall(f"{where}expert {missing} of layer {layer} is missing")


def _latest(folder: str, inside: Mapping[str, str], latest: FileFacts, files: Files) -> Iterator[Shortfall]:
    tag = folder.replace(":", "/").rpartition("/")[2]
    if latest.content != tag:
        yield Shortfall(f"latest names {str(latest.content)[:60]!r}, not {tag}")
    own = [name for base, name in inside.items() if _RANK_ZERO.fullmatch(base)]
    if newer := newer_than(latest.mtime_ns, own, files):
        yield Shortfall(f"{newer} is newer than latest: being overwritten, or an overwrite was interrupted")


def whole_number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- Megatron's older form: a directory for each model-parallel rank --------------------------------------------------

_MODEL_PARALLEL = re.compile(
    r"(.*/)?mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?/(model_optim_rng|model_rng|distrib_optim)\.pt"
)


def _model_parallel(files: Files) -> Iterator[Shortfall]:
    models: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    optimizers: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name in files:
        if match := _MODEL_PARALLEL.fullmatch(name):
            rank = tuple(int(match[axis] or 0) for axis in (2, 3, 4))
            (optimizers if match[5] == "distrib_optim" else models)[match[1] or ""].add(rank)
    for place in sorted({*models, *optimizers}):
        ranks = models[place]
        sizes = [max((r[axis] for r in (*ranks, *optimizers[place])), default=0) + 1 for axis in range(3)]
        expected = sizes[0] * sizes[1] * sizes[2]
        if len(ranks) != expected:
            yield Shortfall(f"{place}{len(ranks)} of {expected} model-parallel ranks have saved")
        elif optimizers[place] and len(optimizers[place]) != expected:
            yield Shortfall(f"{place}{len(optimizers[place])} of {expected} ranks have their distrib_optim.pt")
