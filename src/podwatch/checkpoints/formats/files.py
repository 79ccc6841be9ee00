"""Checks a single file by the kind that its name shows, and for ranges that were never written. Files of unknown kinds
are not checked.
"""

import errno
import json
import os
import re
from pathlib import Path

from podwatch.checkpoints.formats import safetensors, torch_zip
from podwatch.system.files import open_file, opened, read_file

# -- check of one file -----------------------------------------------------------------------------------------------

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


# -- unwritten ranges ------------------------------------------------------------------------------------------------
# safetensors 0.8.0rc0 and downloaders preallocate a file at full size and fill it later, so size and header look
# right mid-write. A hit means "suspect", never "bad": sparse copies and compressing filesystems have holes too, and
# some FUSE filesystems always answer "no hole".

HOLE_FROM = 64 * 1024
"""Bytes. Smaller files have few blocks, and the check of their format sees more."""


def has_hole(path: Path) -> bool:
    """True if the kernel reports an unwritten range; False also where it cannot. OSError: cannot be opened."""
    fd = open_file(path)
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return False
        try:
            return os.lseek(fd, 0, os.SEEK_HOLE) < size
        except OSError:
            return False
    finally:
        os.close(fd)
