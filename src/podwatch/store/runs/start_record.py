"""Decisions of ``podwatch bootstrap``: the files that a run needs on a bare pod, their places, what is left to fill.
Pure.

Record and files come from the store, so whoever can write the bucket can have written them. A name from there is never
used as a path before ``placeable`` accepts it, and nothing is placed before the pod's owner allowed it
(docs/pods.md).
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from podwatch.domain.document import Document, Flag, Many, RunId, Text, checked, matching, shown, strictly
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import check_relative_path
from podwatch.domain.secrets import MASK, name_strength

OBJECT = "bootstrap.json"
"""Name of the record below ``<run>/podwatch/config/``."""
MOST_FILES = 100
MOST_BYTES = 1 << 20
"""Of the record and of each file."""
CONFIG_NAME = "podwatch.toml"


@dataclass(frozen=True, slots=True)
class Placed(Document):
    """Beside podwatch.toml: what an earlier call wrote on this pod. Relative paths are resolved against
    ``directory``."""

    KIND = "podwatch-placed"

    digest: Text
    directory: Text


# -- the record ------------------------------------------------------------------------------------------------------


def absolute(path: str) -> str:
    """``path`` if it is absolute, normal (no ``..``, no doubled slash) and displays as what it is. IntegrityError."""
    if path == "/" or not path.startswith("/"):
        raise IntegrityError("not an absolute path of a file", where=repr(path)[:120])
    check_relative_path(path[1:])
    return path


def _check_directory(path: str) -> None:
    if path != "/":
        absolute(path)


AbsolutePath = Annotated[str, checked(absolute)]
Plain = Annotated[str, shown(1000)]


@dataclass(frozen=True, slots=True)
class StartFile:
    """A file of a start as it is stored: scrubbed. ``path`` is its absolute path on the pod that stored it; ``mode`` is
    octal.

    ``secret``: a file for secrets (``trainer.env_file``): only the names in it are stored, every value is a
    placeholder.
    """

    path: AbsolutePath
    object: Annotated[str, matching(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")]
    sha256: Annotated[str, matching(r"[0-9a-f]{64}")]
    size: Annotated[int, strictly(0, MOST_BYTES)]
    mode: Literal["0600", "0644", "0755"] = "0644"
    secret: Flag = False

    @property
    def permissions(self) -> int:
        return int(self.mode, 8)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file that the command names and that is not stored."""

    path: AbsolutePath
    reason: Plain


@dataclass(frozen=True, slots=True)
class StoredStart(Document):
    """``bootstrap.json``: what a bare pod needs to start this run.

    ``directory``: where podwatch was started; relative paths in the configuration are resolved against it.
    ``settings``: those that came from the environment or the command line, without secrets, for display.
    """

    KIND = "podwatch-bootstrap"
    FILE = OBJECT
    LARGEST = MOST_BYTES

    run_id: RunId
    directory: Annotated[str, checked(_check_directory)]
    config: StartFile
    files: Many[StartFile]
    left_out: Many[LeftOut]
    settings: Mapping[Plain, Plain]
    producer: Plain

    def __post_init__(self) -> None:
        if max(len(self.files), len(self.left_out)) > MOST_FILES:
            raise ValueError(f"files: more than {MOST_FILES}")
        taken = [f.path for f in self.files]
        if any(other.startswith(f"{path}/") or other == path for path, other in _pairs(taken)):
            raise ValueError("files: two cannot both exist at their paths")

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides what a pod runs, except what the operator fills in."""
        files = [[f.path, f.sha256, f.permissions, f.secret] for f in self.files]
        identity = [self.KIND, self.run_id, self.directory, self.config.sha256, files]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def read_start(data: bytes, *, run_id: str) -> StoredStart:
    """The record from the store. IntegrityError for anything that podwatch would not have written; paths are only
    checked for their form here, see ``placeable``."""
    try:
        record = StoredStart.from_bytes(data)
        if record.run_id != run_id:
            raise IntegrityError(f"it belongs to run {record.run_id}")
    except IntegrityError as error:
        raise IntegrityError(
            f"the record of the run's start is not usable: {error.what[:200]}",
            where=OBJECT,
            fix="copy podwatch.toml and the files of its command to this pod yourself, then `podwatch run`",
        ) from error
    return record


def _pairs(paths: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((a, b) for n, a in enumerate(paths) for m, b in enumerate(paths) if n != m)


# -- where files may go ----------------------------------------------------------------------------------------------

USUAL_ROOTS = ("/workspace", "/app", "/data", "/mnt", "/srv", "/lambda/nfs")
"""Where rented pods keep code and data, besides the home directory."""
_NEVER = ("/proc", "/sys", "/dev")
_ENV_FILE = re.compile(r"\.env|\.[A-Za-z0-9_-]+\.env")


def placeable(path: str, roots: Sequence[str], foreign: Sequence[str]) -> str:
    """Why bootstrap does not write the file at ``path``; empty if it may. ``roots``: the allowed directories;
    ``foreign``: the trainer's and podwatch's own directories.

    Hidden names are refused (shells, ssh and others read such files without being asked), except ``.env`` files.
    """
    if any(below(path, root) for root in _NEVER):
        return "it is not on a disk"
    if any(path == place or below(path, place) for place in foreign):
        return "it is inside a directory of checkpoints or of podwatch's state"
    root = max((root for root in roots if below(path, root)), key=len, default="")
    if not root:
        return f"it is outside {', '.join(roots)}"
    *folders, name = path[len(root.rstrip("/")) + 1 :].split("/")
    if any(folder.startswith(".") for folder in folders) or (name.startswith(".") and not _ENV_FILE.fullmatch(name)):
        return "programs read hidden files without being asked"
    return ""


def below(path: str, directory: str) -> bool:
    """Whether ``path`` is inside ``directory``; both absolute and normal."""
    return path.startswith(f"{directory.rstrip('/')}/") and path != directory


# -- placeholders ----------------------------------------------------------------------------------------------------

_KEY = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_.\-]*)[\"']?(?:\s*(?:=>|:=|[=:])\s*|\s+)(?:Bearer\s+|Basic\s+)?[\"']?$")
_EVERYWHERE = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "LANG", "TERM", "HOSTNAME", "TMPDIR", "SHLVL"}
)
"""Variables of every shell: this pod's value is not the other pod's."""
_PLAIN_VALUE = re.compile(r"[!#-&(-\[\]-~]+")
"""Printable ASCII without spaces, quotes and backslashes: it reads the same in TOML, JSON, YAML and env files."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A value that the scrubber removed. ``variable``: the environment variable that fills it; empty if none does.
    ``line`` counts from 1; ``at`` is its offset in the text."""

    line: int
    at: int
    key: str
    variable: str = ""


def placeholders(text: str, *, secret: bool) -> list[Placeholder]:
    """Every placeholder in a file. One whose line names a variable (``WANDB_API_KEY=``) is filled from the variable of
    that name; in a file that is not ``secret`` only if it is one for a secret."""
    found = []
    at = text.find(MASK)
    while at >= 0:
        begin = text.rfind("\n", 0, at) + 1
        match = _KEY.search(text[begin:at])
        key = match["key"] if match else ""
        is_variable = re.fullmatch(r"[A-Z][A-Z0-9_]*", key) and key not in _EVERYWHERE
        variable = key if is_variable and (secret or name_strength(key) == 2) else ""
        found.append(Placeholder(text.count("\n", 0, at) + 1, at, key, variable))
        at = text.find(MASK, at + len(MASK))
    return found


def filled(
    text: str, found: Sequence[Placeholder], environ: Mapping[str, str], withheld: Collection[str] = ()
) -> tuple[str, dict[int, str]]:
    """``text`` with every placeholder filled that the environment has a value for, and for each of the others (by its
    offset) what to do. ``withheld``: values that no file must get, such as the store's key: whoever can write the
    bucket chose the names of the placeholders."""
    open_: dict[int, str] = {}
    pieces, done = [], 0
    for one in found:
        value = environ.get(one.variable, "")
        if not one.variable:
            open_[one.at] = "write the file by hand"
        elif value in withheld:
            open_[one.at] = f"podwatch keeps the value of {one.variable} to itself: write the file by hand"
        elif not value:
            open_[one.at] = f"set {one.variable}"
        elif MASK in value or not _PLAIN_VALUE.fullmatch(value):
            open_[one.at] = f"write the file by hand: the value of {one.variable} contains a space, quote or the like"
        else:
            pieces += [text[done : one.at], value]
            done = one.at + len(MASK)
    return "".join([*pieces, text[done:]]), open_


def fits(template: str, text: str) -> bool:
    """Whether ``text`` is ``template`` with any text in place of its placeholders."""
    first, *pieces = template.split(MASK)
    if not pieces:
        return text == template
    *between, last = pieces
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in between:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True
