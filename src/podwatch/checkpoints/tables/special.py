"""What no table can say: when Orbax has committed, which of prime-rl's tables fits, and prime-rl's W&B runs."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from podwatch.checkpoints.tables.structures import Files, SaveShape, Shortfall, folders_of, matching

# -- Orbax -------------------------------------------------------------------------------------------------------------
# Local file systems: everything is written into ``<name>.orbax-checkpoint-tmp*``, which is renamed. Object stores: the
# directory has its name from the start and ``commit_success.txt`` comes last. Since 2026-08 the renamed ones hold that
# file too; before, ``commit_timestamp_nsecs`` in ``_CHECKPOINT_METADATA`` is set just before the rename.

_COMMIT = "commit_success.txt"
_METADATA = "_CHECKPOINT_METADATA"
_PROCESS = re.compile(r"(?:.*/)?ocdbt\.process_\d+")


def orbax_shortfalls(files: Files, shape: SaveShape) -> Iterator[Shortfall]:
    """The commit, by version; the items that its metadata lists; the arrays of each process."""
    for name in matching(files, ("*.orbax-checkpoint-tmp*",)):
        yield Shortfall(f"{name.partition('/')[0]} is not finished")
    stamps = files[_METADATA].content if _METADATA in files else {}
    stamps = stamps if isinstance(stamps, dict) else {}
    if _COMMIT not in files:
        if matching(files, (f"*/{_COMMIT}",)):
            yield Shortfall(f"{_COMMIT} is missing: it is written last")
        elif not stamps.get("commit_timestamp_nsecs"):
            yield Shortfall(f"{_COMMIT} is missing, and {_METADATA} has no commit time: the save has not finished")
    if set(files) <= {_COMMIT, _METADATA}:
        yield Shortfall("it contains only markers")
    listed = stamps.get("item_handlers")
    for item in sorted(map(str, listed)) if isinstance(listed, dict) else ():
        if not any(name.startswith(f"{item}/") for name in files):
            yield Shortfall(f"{item} is missing, which {_METADATA} lists")
    yield from _arrays(files)
    shape.tokens += [str(stamps[k]) for k in ("init_timestamp_nsecs", "commit_timestamp_nsecs") if stamps.get(k)]


def _arrays(files: Files) -> Iterator[Shortfall]:
    folders = folders_of(files)
    processes = {m.group() for folder in folders if (m := _PROCESS.match(folder))}
    for process in sorted(processes):
        if "manifest.ocdbt" not in folders.get(process, ()) or f"{process}/d" not in folders:
            yield Shortfall(f"the arrays of {process} are missing: it is being removed, or that was interrupted")
    for folder, inside in folders.items():
        described = files[inside["_METADATA"]].content if "_METADATA" in inside else None
        if isinstance(described, dict) and described.get("use_ocdbt") and "manifest.ocdbt" not in inside:
            yield Shortfall(f"{folder}/manifest.ocdbt is missing: it is the index of the arrays")


# -- prime-rl ----------------------------------------------------------------------------------------------------------
# Until 2026-08 the orchestrator's half was below ``run_default``; since then both halves are in ``checkpoints/step_N``.
# Supervised fine-tuning has no orchestrator.

_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_RUN_LINK = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-([A-Za-z0-9][A-Za-z0-9_.-]{0,127})")
_RECENT = 3


def prime_rl_variant(output_dir: Path, checkpoint_dir: Path | None = None) -> str:
    """The name of the table that fits the files on disk; empty while nothing shows it. Blocks."""
    shared = output_dir / "checkpoints"
    if any((step / "orchestrator").is_dir() for step in _newest(shared)):
        return "prime-rl"
    if (output_dir / "run_default").is_dir():
        return "prime-rl-2025"
    steps = _newest((checkpoint_dir or output_dir) / "checkpoints")
    if any((step / "trainer" / "dataloader").is_dir() for step in steps):
        return "prime-rl-sft"
    logs = output_dir / "logs"
    return "prime-rl" if (logs / "attempt_1").is_dir() or (logs / "latest").is_symlink() else ""


def _newest(root: Path) -> list[Path]:
    try:
        names = [path.name for path in root.iterdir()]
    except OSError:
        return []
    steps = sorted(int(m[1]) for name in names if (m := _STEP.fullmatch(name)))
    return [root / f"step_{step}" for step in steps[-_RECENT:]]


def prime_rl_wandb(output_dir: Path, table: str) -> Mapping[str, str]:
    """W&B ids on disk: two runs in old versions, one that both processes share since. Blocks."""
    trainer = _latest_run(output_dir / "wandb")
    orchestrator = _latest_run(output_dir / "run_default" / "wandb") if table == "prime-rl-2025" else ""
    if trainer and orchestrator and trainer != orchestrator:
        return {"trainer": trainer, "orchestrator": orchestrator}
    shared = trainer or orchestrator
    return {"shared": shared} if shared else {}


def _latest_run(directory: Path) -> str:
    try:
        match = _RUN_LINK.fullmatch((directory / "latest-run").readlink().name)
    except OSError:
        return ""
    return match[1] if match else ""


# -- Lightning ---------------------------------------------------------------------------------------------------------

_NAMED_STEP = re.compile(r"(?:^|[-_/])step=([0-9]{1,18})(?=\D|$)")


def lightning_step(name: str, values: Mapping[str, object]) -> int | None:
    """The step inside the file; while that cannot be read, that of its name, if it has one."""
    step = values.get("global_step")
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    match = _NAMED_STEP.search(name)
    return int(match[1]) if match else None
