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


def names_checkpoint(lines: Iterable[str], step: int) -> bool:
    """Whether an error line names the checkpoint of ``step`` (``step_40``, ``checkpoint-40``...)."""
    name = re.compile(rf"(step|checkpoint)[_-]0*{step}(?!\d)", re.IGNORECASE)
    return any(name.search(line) and _LOAD_ERROR.search(line) for line in lines)


def deterministic(lines: Iterable[str]) -> str:
    """The deterministic error that the operator must fix, if the last lines of output show one; else empty."""
    for line in reversed(list(lines)[-LOG_LINES_KEPT:]):
        for pattern, meaning in _DETERMINISTIC:
            if pattern.search(line):
                return meaning
    return ""
