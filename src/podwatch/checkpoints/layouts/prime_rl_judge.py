"""The rule for a complete prime-rl step.

The trainer's half is a DCP directory; the orchestrator's is ``progress.pt``; in layout A the broadcast with ``STABLE``
is needed too. There is no marker for the whole step, so all required parts must be complete.
"""

from collections.abc import Collection, Sequence

from podwatch.checkpoints.layouts.base import Judgement, PartFiles
from podwatch.checkpoints.layouts.inside import WEIGHT_INDEXES
from podwatch.checkpoints.scan import is_temporary
from podwatch.checkpoints.structure import dcp, safetensors, torch_zip
from podwatch.checkpoints.structure.files import check_file

PROGRESS = "progress.pt"
DATALOADER = "dataloader/rank_0.pt"
"""State of the data loader (SFT). Each rank has a file of its own; without rank 0's the trainer refuses to resume."""
STABLE = "STABLE"
NCCL_READY = "NCCL_READY"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Fault(Exception):  # noqa: N818 - internal, never shown as an error
    """Why a part is not complete. ``damaged``: nothing is missing, but a file is broken."""

    def __init__(self, reason: str, *, damaged: bool = False, unreadable: bool = False) -> None:
        self.reason, self.damaged, self.unreadable = reason, damaged, unreadable
        super().__init__(reason)


def judge_set(step: int, parts: Sequence[PartFiles], *, sft: bool = False) -> Judgement:
    """``sft``: supervised fine-tuning, whose steps have only the trainer's half."""
    by_name = {p.part.name: p for p in parts}
    trainer = by_name["trainer"]
    if not trainer.files:
        begun = "orchestrator" in by_name and by_name["orchestrator"].present
        reason = (
            f"waiting for the trainer: only the orchestrator has saved step {step}"
            if begun
            else "the trainer has saved nothing"
        )
        return Judgement(False, reason, pending=begun, problems={"trainer": reason})
    faults: dict[str, Fault] = {}
    verdict = _verdict(trainer)
    try:
        _trainer(trainer, verdict)
        if sft and not any(f.path == DATALOADER for f in trainer.files):
            raise Fault(f"{DATALOADER} is missing")
    except Fault as fault:
        faults["trainer"] = fault
    for name, rule in (("orchestrator", _orchestrator), ("broadcast", _broadcast)):
        part = by_name.get(name)
        if part is None or not part.part.required:
            continue
        try:
            rule(part)
        except Fault as fault:
            faults[name] = fault
    problems = {n: f.reason for n, f in faults.items()}
    missing = [f for f in faults.values() if not f.damaged]
    return Judgement(
        whole=not faults,
        reason="; ".join(f"{n}: {r}" for n, r in problems.items()),
        damaged=bool(faults) and not missing,
        save_token=verdict.save_id,
        world_size=verdict.world_size,
        unreadable=any(f.unreadable for f in faults.values()),
        problems=problems,
        leftovers=tuple(f"trainer/{n}" for n in verdict.leftovers),
    )


def _verdict(part: PartFiles) -> dcp.DcpVerdict:
    return dcp.check(part.part.path, {f.path: dcp.Shard(f.size, f.mtime_ns) for f in part.files})


def _trainer(part: PartFiles, verdict: dcp.DcpVerdict) -> None:
    if not verdict.whole:
        raise Fault(verdict.reason, damaged=verdict.damaged, unreadable=verdict.unreadable)
    _sound(part)


def _orchestrator(part: PartFiles) -> None:
    if not any(f.path == PROGRESS for f in part.files):
        raise Fault(f"{PROGRESS} is missing")
    try:
        problem = torch_zip.check(part.part.path / PROGRESS)
    except OSError as error:
        raise _read_fault(PROGRESS, error) from error
    if problem:
        raise Fault(f"{PROGRESS} {problem}", damaged=True)


def _broadcast(part: PartFiles) -> None:
    """STABLE is written last, so it must not be older than the weights."""
    stable = next((f for f in part.files if f.path == STABLE), None)
    if stable is None:
        raise Fault(f"{STABLE} is missing" if part.present else "the directory is missing")
    markers = {STABLE, NCCL_READY}
    weights = [f for f in part.files if f.path not in markers and not is_temporary(f.path)]
    by_nccl = any(f.path == NCCL_READY for f in part.files)  # weights sent that way leave no file
    if not by_nccl and not any(f.path.endswith(_WEIGHTS) for f in weights):
        raise Fault(f"{STABLE} exists without weights")
    missing = _not_here(part, {f.path for f in weights})
    if missing:
        raise Fault(f"{missing} is missing, which the index of the weights lists")
    newer = [f.path for f in weights if f.mtime_ns > stable.mtime_ns + dcp.MTIME_TOLERANCE_NS]
    if newer:
        raise Fault(f"{min(newer)} is newer than {STABLE}: being rewritten, or that was interrupted")
    _sound(part)


def _not_here(part: PartFiles, names: Collection[str]) -> str:
    """The first missing shard that an index lists; empty if all exist."""
    for name in WEIGHT_INDEXES:
        if name in names:
            try:
                shards = safetensors.read_index(part.part.path / name).shards
            except OSError as error:
                raise _read_fault(name, error) from error
            return min(shards - set(names), default="")
    return ""


def _sound(part: PartFiles) -> None:
    """Check header and tail of every file of a known kind."""
    for file in part.files:
        if is_temporary(file.path):
            continue
        try:
            problem = check_file(part.part.path / file.path)
        except OSError as error:
            raise _read_fault(file.path, error) from error
        if problem:
            raise Fault(f"{file.path} {problem}", damaged=True)


def _read_fault(path: str, error: OSError) -> Fault:
    if isinstance(error, FileNotFoundError):
        return Fault(f"{path} vanished")
    return Fault(f"cannot read {path}: {error.strerror}", unreadable=True)
