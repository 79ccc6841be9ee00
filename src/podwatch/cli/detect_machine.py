"""What a command finds out about this machine: its GPUs, a running trainer, and the settings that follow from both.

The one detection for ``config init``, ``install``, ``check`` and ``run --job``.
"""

import os
import pwd
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from podwatch.checkpoints import trainers
from podwatch.checkpoints.command import Command, can_be_value, without_settings, without_words
from podwatch.checkpoints.layout import Layout
from podwatch.checkpoints.prime_rl import RunDirectory, hints, run_directory, runs_below
from podwatch.checkpoints.shapes import Site
from podwatch.checkpoints.trainer import all_trainers, resume_settings
from podwatch.checkpoints.trainers import recognised
from podwatch.cli.split_environment import split_environment
from podwatch.config.command_directory import current_directory
from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.domain.safe_names import valid_run_id
from podwatch.domain.snapshot import GpuSample
from podwatch.system import procfs

_RESUME = "--resume"
"""A flag of many trainers: alone in some, with a value in others."""
_OUTPUT = ("output_dir", "save_dir", "dump_folder", "save")
"""Settings that name the output directory in trainers that podwatch does not know."""
_NOWHERE = Path("/nonexistent")
"""An output_dir that does not exist, so that a layout is recognised by the command alone."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """A running trainer, or a planned one (``pid`` 0). ``argv`` has no resume flags, ``given`` is the whole command.
    ``secrets`` are never written to the TOML or printed. ``user``: its name, if that is another user than the caller.
    """

    pid: int
    layout: str
    argv: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    removed: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    user: str = ""


DRIVER_SECONDS = 20.0
"""For NVML, whose calls can hang."""


def read_gpus(seconds: float = DRIVER_SECONDS) -> tuple[GpuSample, ...]:
    """Every GPU that NVML lists. ReaderUnavailable with the reason; TimeoutError if a call hangs for ``seconds`` (half
    of that while the library loads)."""
    from podwatch.sensors.gpu import look_once
    from podwatch.system.blocking_calls import in_time

    return in_time(lambda: look_once(seconds / 2), seconds=seconds)


def find_gpus() -> tuple[tuple[GpuSample, ...], str]:
    """The GPUs, and the reason if there are none."""
    from podwatch.sensors.gpu import ReaderUnavailable

    try:
        return read_gpus(), ""
    except ReaderUnavailable as error:
        return (), f"no GPU found: {error}"
    except TimeoutError as error:
        return (), f"podwatch cannot read the GPUs: the driver hangs ({error})"


def visible_gpus(gpus: Sequence[GpuSample], env: Mapping[str, str]) -> tuple[tuple[GpuSample, ...], str]:
    """The GPUs in the trainer's CUDA_VISIBLE_DEVICES, in its order, and a remark if podwatch cannot map its value to a
    GPU. CUDA's rules: indices or prefixes of UUIDs; entries after the first unknown one are not visible."""
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(gpus), ""
    if "MIG-" in value:
        return tuple(gpus), "CUDA_VISIBLE_DEVICES names MIG instances: correct [gpu] in the file"
    found: list[GpuSample] = []
    for word in (word.strip() for word in value.split(",")):
        named = [
            gpu
            for gpu in gpus
            if (word.isdecimal() and gpu.index == int(word)) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found), "" if found or not gpus else f"CUDA_VISIBLE_DEVICES={value} selects no GPU of this machine"


def layout_of(argv: Sequence[str]) -> str:
    """The layout of a known trainer's command; "auto" for a launcher with an unknown script; empty if it is not a
    trainer. Empty for a shell, too: its command is a separate process."""
    command = Command(argv)
    if command.is_shell:
        return ""
    seen = recognised(Site(_NOWHERE, command=tuple(argv)))
    certain = [r.layout for r in seen if r.certain]
    if certain:
        return certain[0] if len(certain) == 1 else "auto"
    return "auto" if command.program.launcher else ""


def find_trainers() -> tuple[tuple[int, str], ...]:
    """Pids and commands of the caller's topmost processes that look like a trainer, oldest first. Other users can give
    a process any command and directory."""
    mine = {os.getpid(), *procfs.ancestors(os.getpid())}
    commands = {pid: procfs.command(pid) for pid in procfs.all_pids() if pid not in mine}
    looks = {pid for pid, argv in commands.items() if layout_of(argv) and _users(pid) == {os.geteuid()}}
    tops = [pid for pid in looks if looks.isdisjoint(procfs.ancestors(pid))]
    return tuple((pid, " ".join(commands[pid])) for pid in sorted(tops, key=lambda pid: procfs.start_ticks(pid) or 0))


def _users(pid: int) -> set[int]:
    """The real and the effective user id; empty if the process is gone."""
    return {*(procfs.users(pid) or ())}


def _user_of(pid: int) -> str:
    """The name of its user; empty for the caller's own process. HostError if it has none, or several users."""
    if (found := _users(pid)) == {os.geteuid()}:
        return ""
    try:
        (uid,) = found
        return pwd.getpwuid(uid).pw_name
    except (ValueError, KeyError) as error:
        uids = ", ".join(map(str, sorted(found)))
        raise HostError(
            f"podwatch cannot run a command as the user of this process (uid {uids})",
            where=f"pid {pid}",
            fix="give the command itself: podwatch config init -- COMMAND",
        ) from error


def read_trainer(pid: int) -> Trainer:
    """Command, directory and environment of that process. Raises HostError or PermissionDenied."""
    import psutil

    try:
        process = psutil.Process(pid)
        argv, cwd, environment = process.cmdline(), process.cwd(), process.environ()
    except psutil.NoSuchProcess as error:
        raise HostError("process not found", where=f"pid {pid}", fix="give a running trainer with --pid") from error
    except psutil.AccessDenied as error:
        raise PermissionDenied(
            "Permission denied: cannot read the trainer's command and environment",
            where=f"pid {pid}",
            fix="run as the same user or as root",
        ) from error
    if not argv:
        raise HostError("the process has no command line", where=f"pid {pid}", fix="give its launcher with --pid")
    command, removed = without_resume(argv, layout_at(argv, Path(cwd)))
    env, secrets = split_environment(environment)
    user = _user_of(pid)
    return Trainer(pid, layout_of(argv) or "auto", command, Path(cwd), env, secrets, removed, tuple(argv), user)


def planned_trainer(argv: Sequence[str], environment: Mapping[str, str]) -> Trainer:
    """The trainer that ``argv`` would start in this shell: here, with its environment."""
    cwd = current_directory()
    command, removed = without_resume(argv, layout_at(argv, cwd))
    env, secrets = split_environment(environment)
    return Trainer(0, layout_of(argv) or "auto", command, cwd, env, secrets, removed, tuple(argv))


def layout_at(argv: Sequence[str], cwd: Path) -> Layout | None:
    """The layout of ``layout_of``, for its resume flags; None where the command does not show one."""
    name = layout_of(argv)
    site = Site(_NOWHERE, cwd=cwd, command=tuple(argv))
    return None if name in ("", "auto") else trainers.layout_of(all_trainers()[name], site)


def without_resume(argv: Sequence[str], layout: Layout | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """argv without resume flags, and the removed words. podwatch adds its own flags with a verified step. The trainer's
    layout decides first which flags these are and which have a value. ``unclear_resume`` stays."""
    own = () if layout is None else layout.resume_command(argv, None, "none", {}).removed
    kept = without_words(argv, own)
    valued = [name for name in resume_settings() if "resume" in name or name.endswith("step")]
    kept, others = without_settings(kept, valued, () if unclear_resume(kept) else (_RESUME,))
    return kept, (*own, *others)


def unclear_resume(argv: Sequence[str]) -> tuple[str, ...]:
    """``--resume`` and the word after it, if that can be its value or an argument of its own; empty otherwise."""
    for flag, word in pairwise(argv):
        if flag == _RESUME and can_be_value(word):
            return flag, word
    return ()


def trainer_config(argv: Sequence[str], cwd: Path) -> dict[str, object]:
    """The configuration files that the command names, merged in order; unreadable ones are left out."""
    merged: dict[str, object] = {}
    for document in Command(argv, cwd, shown=True).documents:
        merged |= document
    return merged


def output_dir_of(argv: Sequence[str], cwd: Path) -> tuple[Path, str]:
    """The likely output directory, absolute, and how it was found."""
    command = Command(argv, cwd, shown=True)
    found = all_trainers().get(layout_of(argv))
    table = None if found is None else found.command
    names = (*table.output, *table.place, *_OUTPUT) if table is not None else _OUTPUT
    if text := command.given(*names):
        return _absolute(cwd / text), f"from {command.written(*names)} in the command"
    configured = command.value(*names)
    if configured:
        return _absolute(cwd / configured), "from output_dir in the trainer's config"
    exists = "it exists" if (cwd / "outputs").is_dir() else "a guess: correct it"
    return _absolute(cwd / "outputs"), f"outputs in the working directory ({exists})"


def run_id_of(argv: Sequence[str], cwd: Path, env: Mapping[str, str], output_dir: Path) -> str:
    """A name for the run: from the trainer's or W&B's settings, else from the directories."""
    command = Command(argv, cwd, shown=True)
    named = [command.given(*_RUN_NAMES), *(command.value(name) for name in _RUN_NAMES)]
    candidates = [name for name in named if name]
    candidates += [env.get("WANDB_NAME", ""), f"{output_dir.parent.name}-{output_dir.name}", output_dir.name, "run"]
    for candidate in candidates:
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", candidate).strip("-._")[:128]
        if name and valid_run_id(name):
            return name
    return "run"


_RUN_NAMES = ("run.name", "wandb.name", "run_name")


def gpu_split(gpus: Sequence[GpuSample], config: Mapping[str, object]) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """Inference and trainer GPUs, and how they were found (prime-rl's "inference first" default)."""
    indices = tuple(gpu.index for gpu in gpus)
    inference, trainer = config.get("inference_gpu_ids"), config.get("trainer_gpu_ids")
    if _indices(inference):
        first, second = _as_indices(inference), _as_indices(trainer)
        named = {*first, *second}
        if indices and not named <= set(indices) and max(named) < len(indices):
            # indices into the visible GPUs
            places = "from the trainer's config, counted in CUDA_VISIBLE_DEVICES"
            return tuple(indices[n] for n in first), tuple(indices[n] for n in second), places
        return first, second, "from the trainer's config"
    deployment = config.get("deployment")
    count = deployment.get("num_infer_gpus") if isinstance(deployment, dict) else None
    if isinstance(count, int) and 0 < count <= len(indices):
        trains = deployment.get("num_train_gpus") if isinstance(deployment, dict) else None
        last = count + trains if isinstance(trains, int) else len(indices)
        return indices[:count], indices[count:last], "from num_infer_gpus in the trainer's config"
    if len(indices) == 1:
        return indices, indices, "one GPU for both"
    if not indices:
        return (), (), "no GPU"
    return indices[:1], indices[1:], "prime-rl's default: the first GPU for inference; correct it if yours differs"


def _indices(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, int) for item in value)


def _as_indices(value: object) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) and _indices(value) else ()


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path))


# -- run directory of prime-rl ---------------------------------------------------------------------------------------
# The command does not always name it: versions with run directories generate a name. Open files of the process tree
# decide; the fallbacks are the command and the newest run below output_dir, which can be another run's.

_OLD_TREE = frozenset(
    {"logs", "run_default", "checkpoints", "weights", "rollouts", "broadcasts", "wandb", "torchrun", "configs", "evals"}
)
"""The entries that a version without run directories writes directly below output_dir."""


@dataclass(frozen=True, slots=True)
class OwnRun:
    """``how``: how the directory was found. ``added``: words that the command needs to use it again."""

    path: Path
    how: str
    added: tuple[str, ...] = ()


def run_of(pid: int, command: Sequence[str], cwd: Path, name: str) -> OwnRun | None:
    """The run directory of process ``pid``. None if it writes to output_dir itself, or if there is no sign of a run
    directory. ``command`` has its resume flags: they show the version. ``pid`` 0: it has not started, so only its
    command counts, and without a name in it the run gets ``name``. Blocks."""
    asked = Command(command, cwd, shown=True)
    says = run_directory(asked)
    written = _written_below(pid, says.base) if pid else ""
    if written:
        return _own(says, says.base / written, f"pid {pid} has files open in it")
    new = hints(asked, "").new_flags
    if not new and not runs_below(says.base):
        return None
    if says.path is not None:
        return _own(says, says.path, "from run.name in the command or its configuration")
    if not pid:
        return _own(says, says.base / name, "prime-rl's run directory, by the name of the run") if new else None
    newest = runs_below(says.base)
    return _own(says, newest[0], f"the newest run below {says.base}") if newest else None


def _own(says: RunDirectory, path: Path, how: str) -> OwnRun:
    added = () if says.path is not None else ("--run.name", path.name)
    return OwnRun(path, how, added)


def _written_below(pid: int, base: Path) -> str:
    """The name of the run directory with most open files of the process tree; empty if there are none."""
    root = os.path.realpath(base) + "/"
    seen: Counter[str] = Counter()
    for member in (pid, *procfs.descendants(pid)):
        for file in (procfs.open_files(member) or {}).values():
            first, _, rest = file.removeprefix(root).partition("/")
            if file.startswith(root) and rest and first not in _OLD_TREE:
                seen[first] += 1
    return seen.most_common(1)[0][0] if seen else ""


# -- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proposal:
    """What this machine and a trainer say about the settings. ``settings``: by dotted key; ``notes``: where the value
    comes from; ``no_gpu``: why there is no GPU; ``added``: words that the trainer's command needs."""

    settings: dict[str, object]
    notes: dict[str, str]
    no_gpu: str = ""
    added: tuple[str, ...] = ()


def propose(trainer: Trainer | None, *, with_gpus: bool = True) -> Proposal:
    """The settings for this trainer, and, ``with_gpus``, for the GPUs here. Reads the trainer's configuration."""
    argv: tuple[str, ...] = trainer.argv if trainer else ()
    cwd: Path = trainer.cwd if trainer else current_directory()
    env: Mapping[str, str] = trainer.env if trainer else {}
    output_dir, how = output_dir_of(argv, cwd)
    run_id = run_id_of(argv, cwd, env, output_dir)
    added: tuple[str, ...] = ()
    own = run_of(trainer.pid, trainer.given, cwd, run_id) if trainer and trainer.layout == "prime-rl" else None
    if own is not None:
        output_dir, how, added = own.path, own.how, own.added
        run_id = run_id_of(argv if trainer and trainer.pid else (*argv, *added), cwd, env, output_dir)
    found: dict[str, object] = {
        "run_id": run_id,
        "trainer.layout": trainer.layout if trainer else "auto",
        "trainer.output_dir": str(output_dir),
        "trainer.cwd": str(cwd),
    }
    notes = {"trainer.output_dir": how}
    if trainer is not None:
        copied = f"copied from pid {trainer.pid}" if trainer.pid else ""
        named = f"{' '.join(added)} added: else each start would use a new directory" if added else ""
        found |= {"trainer.command": [*argv, *added], "trainer.env": dict(env)}
        notes["trainer.command"] = "; ".join(note for note in (copied, named) if note)
    if trainer is not None and trainer.user:
        found["trainer.user"] = trainer.user
        notes["trainer.user"] = f"pid {trainer.pid} runs as this user"
    no_gpu = ""
    if with_gpus:
        gpus, no_gpu = find_gpus()
        gpus, hidden = visible_gpus(gpus, env)
        no_gpu = no_gpu or hidden
        inference, training, sure = gpu_split(gpus, trainer_config(argv, cwd))
        if inference or training:
            found |= {"gpu.inference": list(inference), "gpu.trainer": list(training)}
            notes["gpu.trainer"] = "; ".join(f"GPU {gpu.index}: {gpu.name}" for gpu in gpus)
        notes["gpu.inference"] = sure if inference or training else no_gpu
    return Proposal(found, {key: note for key, note in notes.items() if note}, no_gpu, added)
