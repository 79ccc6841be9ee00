"""Checks a single file by the kind that its name shows. Files of unknown kinds are not checked."""

import errno
import json
import re
from pathlib import Path

from podwatch.checkpoints.structure import safetensors, torch_zip
from podwatch.system.reading import opened, read_file

_TORCH = (".pt", ".pth", ".ckpt")
_TORCH_BIN = re.compile(r"(?:pytorch_model|adapter_model|optimizer|scheduler|model|training_args)\b.*\.bin$")
"""Files that Hugging Face and accelerate write by torch.save: an empty one is never complete. Other programs can write
an empty ``.bin`` on purpose."""
_JSON_LIMIT = 64 * 1024 * 1024


def can_check(name: str) -> bool:
    """Whether ``check_file`` knows the structure of a file with this name."""
    return name.endswith((".safetensors", ".json", ".bin", *_TORCH))


def check_file(path: Path) -> str:
    """Empty if the file is sound or of an unknown kind, else the problem. The caller handles OSError."""
    name = path.name
    if name.endswith(".safetensors"):
        return safetensors.read_header(path).problem
    if name.endswith(_TORCH):
        return torch_zip.check(path)
    if name.endswith(".bin"):
        # Any program can use .bin: only a file that starts like a torch file is checked as one.
        with opened(path) as file:
            head = file.read(4)
        if not head:
            return "is empty" if _TORCH_BIN.match(name) else ""
        begins_so = head == b"PK\x03\x04"[: len(head)]  # a file of one to three bytes is truncated
        return torch_zip.check(path) if begins_so else ""
    if name.endswith(".json"):
        return check_json(path)
    return ""


def check_json(path: Path) -> str:
    """Empty if the file parses as JSON (a file larger than any trainer writes is not read)."""
    try:
        json.loads(read_file(path, _JSON_LIMIT))
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
    except (ValueError, RecursionError):
        return "is not valid JSON (being written, or truncated)"
    return ""
