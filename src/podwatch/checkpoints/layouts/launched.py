"""How many processes a launcher starts in all, as far as its own arguments say so for sure: ``torchrun``, ``accelerate
launch``, ``deepspeed``. What stands in a config file, a hostfile or the environment is not known here."""

from collections.abc import Sequence
from pathlib import Path

from podwatch.checkpoints.layouts import argv

_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ELSEWHERE = ("--hostfile", "-H", "--include", "-i", "--exclude", "-e")
"""With these deepspeed takes other hosts or GPUs than its numbers say."""


def launched(command: Sequence[str]) -> int | None:
    """None: no launcher, or it does not say."""
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
    """The launcher's arguments, without those of what it launches."""
    for position, word in enumerate(words):
        if word in ("-m", "--module") or word.endswith(".py"):
            return words[:position]
    return words


def _times(on_each: str | None, nodes: str | None) -> int | None:
    """``auto``, ``gpu`` and ranges of nodes (``1:4``) are decided when it starts."""
    each, count = argv.positive(on_each), argv.positive(nodes if nodes is not None else "1")
    return each * count if each is not None and count is not None else None
