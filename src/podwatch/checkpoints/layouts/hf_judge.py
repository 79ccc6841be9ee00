"""When is a Hugging Face ``checkpoint-N`` whole? (facts/checkpoints.md section 1b)"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from podwatch.checkpoints.layouts.base import Judgement, PartFiles
from podwatch.checkpoints.scan import is_temporary
from podwatch.checkpoints.structure import dcp, safetensors, torch_zip
from podwatch.checkpoints.structure.files import check_file
from podwatch.checkpoints.structure.holes import has_hole
from podwatch.domain.checkpoint import FileEntry

STATE = "trainer_state.json"
UNFINISHED = "checkpoint-is-incomplete.txt"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "adapter_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHARD = re.compile(r"^(?:model|pytorch_model)-\d{5}-of-\d{5}\.(?:safetensors|bin)$")
_FSDP_MODEL = re.compile(r"^pytorch_model_fsdp_\d+$")
_FSDP_OPTIMIZER = re.compile(r"^optimizer_\d+$")
_ZERO = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt$")
_RNG = re.compile(r"^rng_state_(\d+)\.pth$")
_LATE = re.compile(r"^(?:rng_state(?:_\d+)?\.pth|trainer_state\.json)$")
"""Other ranks may write their random state after rank 0 wrote the state file: there is no barrier."""


class _Fault(Exception):  # noqa: N818 - internal
    def __init__(self, reason: str, *, damaged: bool = False, unreadable: bool = False) -> None:
        self.reason, self.damaged, self.unreadable = reason, damaged, unreadable
        super().__init__(reason)


def judge_checkpoint(step: int, part: PartFiles) -> Judgement:
    """Apply the whole rule to one directory."""
    if not part.files:
        return Judgement(False, "the directory is empty")
    directory = _Directory(part)
    try:
        directory.finished(step)
        deepspeed = directory.deepspeed()
        if not deepspeed:
            directory.weights()
            directory.optimizer()
            directory.require("scheduler.pt")
        directory.all_sound()
    except _Fault as fault:
        problems = {part.part.name: fault.reason}
        return Judgement(
            False, fault.reason, damaged=fault.damaged, strong=False, unreadable=fault.unreadable, problems=problems
        )
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            return Judgement(False, "a file vanished while being read")
        return Judgement(False, f"cannot be read: {error.strerror}", unreadable=True)
    ranks = [int(m.group(1)) for m in map(_RNG.match, directory.names) if m]
    # Only one rank, or a closing barrier (DeepSpeed), makes the state file a true last file.
    strong = (deepspeed or not ranks) and not directory.has_holes()
    tokens = "-".join(directory.save_ids)
    return Judgement(
        True, strong=strong, save_token=tokens, world_size=directory.world_size or (max(ranks) + 1 if ranks else None)
    )


class _Directory:
    def __init__(self, part: PartFiles) -> None:
        self.path: Path = part.part.path
        self.files: dict[str, FileEntry] = {f.path: f for f in part.files if not is_temporary(f.path)}
        self.names: Iterable[str] = self.files.keys()
        self.world_size: int | None = None
        self.save_ids: list[str] = []

    def require(self, name: str) -> None:
        if name not in self.files:
            raise _Fault(f"{name} is missing")

    def finished(self, step: int) -> None:
        """The state file is there, says this step, and is not older than what it speaks for."""
        if UNFINISHED in self.files:
            raise _Fault(f"{UNFINISHED} is there: a save at a stop signal that was not finished")
        if STATE not in self.files:
            raise _Fault(f"{STATE} is missing: it is written last")
        try:
            state = json.loads((self.path / STATE).read_bytes())
            recorded = state["global_step"]
        except (ValueError, KeyError, TypeError) as error:
            raise _Fault(f"{STATE} cannot be parsed: being written, or cut off", damaged=True) from error
        if recorded != step:
            raise _Fault(f"{STATE} says step {recorded}, not {step}", damaged=True)
        limit = self.files[STATE].mtime_ns + dcp.MTIME_TOLERANCE_NS
        newer = [n for n, f in self.files.items() if f.mtime_ns > limit and not _LATE.match(n) and _matters(n)]
        if newer:
            raise _Fault(f"{min(newer)} is newer than {STATE}: being overwritten, or that was cut off")

    def weights(self) -> None:
        if any(n in self.files for n in _WEIGHTS) or "pytorch_model_fsdp.bin" in self.files:
            return
        index = next((n for n in _INDEXES if n in self.files), None)
        if index is not None:
            self._sharded(index)
        elif not self._dcp(_FSDP_MODEL):
            shards = any(_SHARD.match(n) for n in self.names)
            raise _Fault("the weights' index is missing" if shards else "the weights are missing")

    def optimizer(self) -> None:
        if "optimizer.pt" not in self.files and "optimizer.bin" not in self.files and not self._dcp(_FSDP_OPTIMIZER):
            raise _Fault("optimizer.pt is missing: a resume would silently start a fresh optimizer")

    def _sharded(self, name: str) -> None:
        index = safetensors.read_index(self.path / name)
        if index.problem:
            raise _Fault(f"{name} {index.problem}", damaged=True)
        for shard in sorted(index.shards):
            self.require(shard)
        if name.startswith("model.safetensors"):
            headers = [safetensors.read_header(self.path / s) for s in sorted(index.shards)]
            missing = safetensors.missing_tensors(index, headers)
            if missing and not any(h.problem for h in headers):
                raise _Fault(f"{len(missing)} tensors of {name} are in no shard (a stale index?)", damaged=True)

    def _dcp(self, pattern: re.Pattern[str]) -> bool:
        tops = {n.split("/", 1)[0] for n in self.names if "/" in n}
        chosen = sorted(t for t in tops if pattern.match(t))
        for top in chosen:
            inside = {
                n.removeprefix(top + "/"): dcp.Shard(f.size, f.mtime_ns)
                for n, f in self.files.items()
                if n.startswith(top + "/")
            }
            verdict = dcp.check(self.path / top, inside)
            if not verdict.whole:
                raise _Fault(f"{top}: {verdict.reason}", damaged=verdict.damaged, unreadable=verdict.unreadable)
            self.save_ids.append(verdict.save_id)
            self.world_size = self.world_size or verdict.world_size
        return bool(chosen)

    def deepspeed(self) -> bool:
        """``latest`` names a tag whose ZeRO shards must all be there; False if this is no DeepSpeed checkpoint."""
        tags = {n.split("/", 1)[0] for n in self.names if re.match(r"^global_step\d+/", n)}
        if not tags and "latest" not in self.files:
            return False
        self.require("latest")
        tag = (self.path / "latest").read_text(encoding="utf-8", errors="replace").strip()
        if tag not in tags:
            raise _Fault(f"latest names {tag[:60]!r}, which is not here")
        inside = [n.split("/", 1)[1] for n in self.names if n.startswith(tag + "/")]
        models = sorted(n for n in inside if n.endswith("_model_states.pt"))
        if not models:
            raise _Fault(f"{tag} has no model states")
        have: dict[tuple[str, str], set[int]] = {}
        for match in filter(None, map(_ZERO.match, inside)):
            have.setdefault((match.group(3), match.group(2)), set()).add(int(match.group(1)))
        values = torch_zip.read_values(self.path / tag / models[0]) or {}
        world = values.get("dp_world_size")
        size = world if isinstance(world, int) and world > 0 else 0
        if size and not any(kind == "optim" for kind, _ in have):
            raise _Fault(f"{tag} has no optimizer shards")
        for (kind, rank), found in sorted(have.items()):
            missing = set(range(size or max(found) + 1)) - found
            if missing:
                raise _Fault(f"{tag}: {kind} shard of rank {min(missing)} (mp {rank}) is missing")
        self.world_size = size or None
        return True

    def all_sound(self) -> None:
        for name in sorted(self.names):
            if not name.endswith(".distcp"):
                problem = check_file(self.path / name)
                if problem:
                    raise _Fault(f"{name} {problem}", damaged=True)

    def has_holes(self) -> bool:
        return any(has_hole(self.path / n) for n in self.names if n.endswith(".safetensors"))


def _matters(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".distcp", ".json", dcp.INDEX))
