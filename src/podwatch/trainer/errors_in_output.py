"""What the last lines of a trainer's output prove: an error that each start repeats, or a failed load. Pure."""

import re
from collections.abc import Iterable

LOG_LINES_KEPT = 30
"""Lines of the trainer's last output that the operator sees after podwatch gave up."""
_LOAD_ERROR = re.compile(
    r"error|exception|corrupt|truncated|cannot|could not|fail|unexpected|missing key|size mismatch", re.IGNORECASE
)
_DETERMINISTIC: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), meaning)
    for pattern, meaning in (
        (r"unrecognized arguments?:|unknown (argument|option)|unexpected (argument|option)", "unknown argument"),
        (r"no such option|error: no such command", "unknown option"),
        (r"extra inputs? (is|are) not permitted|extra_forbidden", "the trainer's configuration has an unknown key"),
        (r"\bvalidation errors? for\b|pydantic_core\S*ValidationError", "the trainer's configuration is not valid"),
        (
            r"(wandb|w&b).{0,80}(api.?key (not|is not|isn't)|no api.?key)|no API key configured",
            "the W&B key is missing",
        ),
        (r"max_(completion_)?tokens.{0,60}(too large|exceeds)", "max_tokens is larger than the model allows"),
        (r"command not found|No module named ", "the command or one of its modules is not installed"),
    )
)


_DAMAGED_WEIGHTS = re.compile(
    r"PytorchStreamReader failed|PyTorchFileReader\(|invalid header or archive is corrupted|Weights only load failed"
    r"|SafetensorError|Error while deserializing header|\bCheckpointException\b|global metadata read failed"
)
"""Errors that only a reader of weights raises: torch's zip files, safetensors, torch.distributed.checkpoint."""
_LOADING_FRAME = re.compile(
    r"(?:torch/serialization|torch/distributed/checkpoint/\w+|safetensors/\w+|deepspeed/\S*checkpoint\w*)\.py\"?,"
    r" line \d+, in \w*(?:load|read)"
)
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception)\b")
_DISK = re.compile(r"Input/output error|Remote I/O error|Stale file handle|Transport endpoint|Permission denied")
"""The file could not be read: that says nothing about its content."""


def shows_failed_load(lines: Iterable[str], step: int) -> bool:
    """Whether the end of a start's output proves that it could not load the checkpoint of ``step``: an error line names
    it (``step_40``, ``checkpoint-40``...), or is one that only a reader of weights raises, or an exception came out of
    a function of such a reader. Most libraries name no file. Not if the disk could not read it."""
    shown = list(lines)
    if any(map(_DISK.search, shown)):
        return False
    name = re.compile(rf"(step|checkpoint)[_-]0*{step}(?!\d)", re.IGNORECASE)
    if any((name.search(line) and _LOAD_ERROR.search(line)) or _DAMAGED_WEIGHTS.search(line) for line in shown):
        return True
    frames = [n for n, line in enumerate(shown) if _LOADING_FRAME.search(line)]
    return bool(frames) and any(_EXCEPTION.search(line) for line in shown[frames[-1] + 1 :])


def deterministic(lines: Iterable[str]) -> str:
    """The deterministic error that the operator must fix, if the last lines of output show one; else empty."""
    for line in reversed(list(lines)[-LOG_LINES_KEPT:]):
        for pattern, meaning in _DETERMINISTIC:
            if pattern.search(line):
                return meaning
    return ""
