"""The total number of processes that a launcher starts, if its own arguments determine it: ``torchrun``, ``accelerate
launch``, ``deepspeed``. Config files, hostfiles and the environment are not read."""

from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import argv

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ELSEWHERE = ("--hostfile", "-H", "--include", "-i", "--exclude", "-e")
"""With these options deepspeed uses other hosts or GPUs than its numbers."""


def launched(command: Sequence[str]) -> int | None:
    """The number of processes; None: no launcher, or not determined."""
    for position, word in enumerate(command):
        name = Path(word).name
        if name in _TORCHRUN:
            own = _own(command[position + 1 :])
            return _times(argv.flag_value(own, ("--nproc-per-node",)), argv.flag_value(own, ("--nnodes",)))
        if name == "accelerate":
            return argv.positive(argv.flag_value(_own(command[position + 1 :]), ("--num-processes",)))
        if name == "deepspeed":
            own = _own(command[position + 1 :])
            if argv.has_flag(own, _ELSEWHERE):
                return None
            return _times(argv.flag_value(own, ("--num-gpus",)), argv.flag_value(own, ("--num-nodes",)))
    return None


def _own(words: Sequence[str]) -> Sequence[str]:
    """The launcher's own arguments, without those of the launched program."""
    for position, word in enumerate(words):
        if word in ("-m", "--module") or word.endswith(".py"):
            return words[:position]
    return words


def _times(on_each: str | None, nodes: str | None) -> int | None:
    """The product; None for ``auto``, ``gpu`` and ranges of nodes (``1:4``), which the launcher resolves at its
    start."""
    each, count = argv.positive(on_each), argv.positive(nodes if nodes is not None else "1")
    return each * count if each is not None and count is not None else None
