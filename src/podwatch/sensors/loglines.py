"""Lines of training logs: from bytes to lines, from a line to a step. Pure.

prime-rl's forms: no date, ANSI colours always on, torchrun prefixes, or JSON.
"""

import json
import re
from dataclasses import dataclass

MAX_LINE = 16 << 10
"""Bytes of one line that are kept; a log without line ends must not fill the memory."""

_LINE_END = re.compile(rb"[\r\n]")
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PREFIX = re.compile(r"^\s*(?:\[(?P<name>[A-Za-z_][\w.-]{0,40})\]:\s*|\([\w :=.,+-]{1,80}\)\s*)")
# The level must be first or right after a time stamp: model output quoted inside a line must not count as a step.
_STEP = re.compile(r"^[\d\s:.,TZ/+|-]{0,40}SUCCESS\s+Step (\d{1,12}) \|")
_BARE = re.compile(r"^[\d\s:.,TZ/+|-]{0,40}(?:\b[A-Z]{4,8}\b[\s|:-]*)?")
_LOCATION = re.compile(r"\s*\[[\w./-]+::\d+\]$")
_JSON_STEP = re.compile(r"^Step (\d{1,12}) \|")
# A flat dictionary of numbers and nothing else: a log message that quotes one must not match.
_HF_FIGURES = re.compile(r"""^\{(?:['"][\w./@-]{1,60}['"]: ?['"]?[\w.+-]{1,40}['"]?(?:, ?|\}$))+$""")
_HF_LOSS = re.compile(r"""['"]loss['"]:""")
_VERL_STEP = re.compile(r"^step:(\d{1,12}) - ")
_VERL_TRAINED = re.compile(r" - (?:actor|critic|training|train|perf|timing_s|global_seqlen|response_length)[/(]")
_TITAN_STEP = re.compile(
    r"^(?:\[titan\]\s*)?[\d\s:.,TZ/+|-]{0,40}(?:- \w{1,40} - INFO - )?step: {1,12}(\d{1,12})  loss: "
)
_MEGATRON_STEP = re.compile(
    r"^(?:\[[\d\s:.-]{1,30}\]\s*)?iteration {1,12}(\d{1,12})/ {0,12}\d{1,12} \| consumed samples:"
)
_DEEPSPEED_STEP = re.compile(
    r"^(?:\[[\d\s:.,-]{1,30}\] )?\[INFO\] \[logging\.py:[^\]]{1,40}\] (?:\[Rank 0\] )?step=(\d{1,12}), skipped="
)
_HF_STEP = re.compile(r"""['"](?:global_step|step)['"]: ?['"]?(\d{1,12})['"]?[,}]""")


@dataclass(frozen=True, slots=True)
class Carry:
    """State of a splitter between two chunks: the unfinished line, and whether to drop its rest."""

    begun: bytes = b""
    overlong: bool = False


def split_lines(carry: Carry, chunk: bytes) -> tuple[Carry, tuple[bytes, ...]]:
    """Add a chunk; returns the lines it completed, without line ends and empty lines, cut to MAX_LINE bytes.

    A carriage return also ends a line: progress bars use it. The result does not depend on the chunk boundaries.
    """
    lines: list[bytes] = []
    *complete, rest = _LINE_END.split(chunk)
    begun, overlong = carry.begun, carry.overlong
    for piece in complete:
        line = begun if overlong else (begun + piece)[:MAX_LINE]
        if line:
            lines.append(line)
        begun, overlong = b"", False
    if not overlong:
        begun += rest
        if len(begun) > MAX_LINE:
            begun, overlong = begun[:MAX_LINE], True
    return Carry(begun, overlong), tuple(lines)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One decoded line. ``prefix`` is torchrun's name ("trainer0", "default0"), else empty."""

    text: str
    prefix: str = ""
    nested: bool = False
    """The line is a bar below another bar: tqdm moves the cursor up again after it."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """A finished step. ``role`` is empty where the line does not show it."""

    step: int
    role: str = ""


def clean(raw: bytes) -> LogLine:
    """Decode, strip colours and ``[trainer0]:``-like prefixes. Never raises."""
    decoded = raw.decode("utf-8", errors="replace")
    text = _ANSI.sub("", decoded)
    prefix = ""
    while (match := _PREFIX.match(text)) is not None:
        prefix = match["name"] or prefix
        text = text[match.end() :]
    return LogLine(text.strip(), prefix, "\x1b[A" in decoded and not decoded.startswith("\x1b[A"))


def parse_step(line: LogLine, file_role: str = "") -> StepLine | None:
    """The step that this line reports as done, or None. Never raises. ``file_role`` is the result of role_of_file().

    Recognized: prime-rl's ``SUCCESS Step 80 | ...``, the same in JSON mode, a dictionary with ``loss`` and a step as
    Hugging Face trainers print it (those without a step are skipped), and the step lines of verl, torchtitan,
    Megatron-LM and DeepSpeed; their lines about validation are not steps. Progress bars need more than one line:
    ``sensors/bars.py``.
    """
    text = line.text
    role = _role_in(line.prefix) or file_role
    match = _STEP.match(text)
    if match is not None:
        return StepLine(int(match[1]), role or _role_by_columns(text))
    if not text.startswith("{"):
        return _other_step(text, role)
    message = _json_message(text)
    if message is not None:
        match = _JSON_STEP.match(message)
        return StepLine(int(match[1]), role or _role_by_columns(message)) if match is not None else None
    if not is_training_log(text):
        return None
    match = _HF_STEP.search(text)
    return StepLine(int(match[1]), role) if match is not None else None


def is_training_log(text: str) -> bool:
    """Whether the text is a dictionary of metrics with ``loss``, as Hugging Face trainers print it (not
    ``eval_loss``)."""
    return text.startswith("{") and _HF_FIGURES.match(text) is not None and _HF_LOSS.search(text) is not None


def _other_step(text: str, role: str) -> StepLine | None:
    match = _VERL_STEP.match(text)
    if match is not None and match[1] != "0" and _VERL_TRAINED.search(text) is not None:
        return StepLine(int(match[1]), role)
    for pattern in (_TITAN_STEP, _MEGATRON_STEP, _DEEPSPEED_STEP):
        if (match := pattern.match(text)) is not None:
            return StepLine(int(match[1]), role)
    return None


def has_finish_line(line: LogLine, finish_line: str) -> bool:
    """Whether this line's message is the trainer's finish line (not merely a quotation of it)."""
    text = line.text
    if text.startswith("{"):
        text = _json_message(text, level=None) or ""
    return finish_line in text and _BARE.sub("", _LOCATION.sub("", text), count=1) == finish_line


def role_of_file(path: str) -> str:
    """The role that writes this file. A step line alone does not show it: both formats start the same way."""
    return _role_in(path)


def _role_in(text: str) -> str:
    lowered = text.lower()
    if "orchestrator" in lowered:
        return "orchestrator"
    return "trainer" if "trainer" in lowered else ""


def _role_by_columns(text: str) -> str:
    """prime-rl's orchestrator reports a reward, its trainer a loss."""
    if "Reward" in text:
        return "orchestrator"
    return "trainer" if "Loss" in text else ""


def _json_message(text: str, level: str | None = "SUCCESS") -> str | None:
    """The message of a JSON-mode line, flat or in loguru's ``record``; None if it is something else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(document, dict) and isinstance(document.get("record"), dict):
        document = document["record"]
    if not isinstance(document, dict):
        return None
    found = document.get("level")
    if isinstance(found, dict):
        found = found.get("name")
    message = document.get("message")
    if not isinstance(message, str) or not isinstance(found, str):
        return None
    return message.strip() if level is None or found.strip().upper() == level else None
