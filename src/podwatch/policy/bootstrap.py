"""Decisions of ``podwatch bootstrap``: the files that a run needs on a bare pod, their places, what is left to fill.
Pure.

Record and files come from the store, so whoever can write the bucket can have written them. A name from there is never
used as a path before ``placeable`` accepts it, and nothing is placed before the pod's owner allowed it
(docs/bootstrap.md).
"""

import hashlib
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import check_relative_path, deceives, valid_run_id
from podwatch.domain.secrets import MASK, name_strength

KIND = "podwatch-bootstrap"
OBJECT = "bootstrap.json"
"""Name of the record below ``<run>/podwatch/config/``."""
MOST_FILES = 100
MOST_BYTES = 1 << 20
"""Of the record and of each file."""
CONFIG_NAME = "podwatch.toml"

_SCHEMA_VERSION = 1
_OBJECT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MODES = (0o600, 0o644, 0o755)


# -- the record ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartFile:
    """A file of a start as it is stored: scrubbed. ``path`` is its absolute path on the pod that stored it.

    ``secret``: a file for secrets (``trainer.env_file``): only the names in it are stored, every value is a
    placeholder.
    """

    path: str
    object: str
    sha256: str
    size: int
    mode: int = 0o644
    secret: bool = False


@dataclass(frozen=True, slots=True)
class StartRecord:
    """``bootstrap.json``: what a bare pod needs to start this run.

    ``directory``: where podwatch was started; relative paths in the configuration are resolved against it.
    ``left_out``: (path, reason) of each file that the command names and that is not stored. ``settings``: those that
    came from the environment or the command line, without secrets, for display.
    """

    run_id: str
    directory: str
    config: StartFile
    files: tuple[StartFile, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    producer: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of everything that decides what a pod runs, except what the operator fills in."""
        files = [[f.path, f.sha256, f.mode, f.secret] for f in self.files]
        identity = [KIND, self.run_id, self.directory, self.config.sha256, files]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        document = {
            "schema_version": _SCHEMA_VERSION,
            "kind": KIND,
            "run_id": self.run_id,
            "producer": self.producer,
            "directory": self.directory,
            "config": _document(self.config),
            "files": [_document(f) for f in self.files],
            "left_out": [{"path": path, "reason": reason} for path, reason in self.left_out],
            "settings": dict(self.settings),
        }
        return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, *, run_id: str) -> "StartRecord":
        """Parse and check a record from the store. IntegrityError for anything that podwatch would not have written;
        paths are only checked for their shape here, see ``placeable``."""
        try:
            doc = json.loads(data)
            if not isinstance(doc, dict) or doc.get("kind") != KIND:
                raise ValueError(f"not a {KIND} document")
            if doc.get("schema_version") != _SCHEMA_VERSION:
                raise ValueError(f"this podwatch does not support its schema_version {doc.get('schema_version')!r:.20}")
            record = cls(
                run_id=_text(doc["run_id"]),
                directory=_text(doc["directory"]) if doc["directory"] == "/" else absolute(_text(doc["directory"])),
                config=_file(doc["config"]),
                files=tuple(_file(one) for one in _items(doc["files"])),
                left_out=tuple((absolute(_text(o["path"])), _text(o["reason"])) for o in _items(doc["left_out"])),
                settings={_text(key): _text(value) for key, value in dict(doc["settings"]).items()},
                producer=_text(doc["producer"]),
            )
            if record.run_id != run_id or not valid_run_id(run_id):
                raise ValueError(f"it belongs to run {record.run_id!r:.120}")
            taken = [f.path for f in record.files]
            if any(other.startswith(f"{path}/") or other == path for path, other in _pairs(taken)):
                raise ValueError("two files cannot both exist at their paths")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, IntegrityError) as error:
            raise IntegrityError(
                f"the record of the run's start is not usable: {str(error)[:200]}",
                where=OBJECT,
                fix="copy podwatch.toml and the files of its command to this pod yourself, then `podwatch run`",
            ) from error
        return record


def absolute(path: str) -> str:
    """``path`` if it is absolute, normal (no ``..``, no doubled slash) and displays as what it is. IntegrityError."""
    if path == "/" or not path.startswith("/"):
        raise IntegrityError("not an absolute path of a file", where=repr(path)[:120])
    check_relative_path(path[1:])
    return path


def _pairs(paths: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((a, b) for n, a in enumerate(paths) for m, b in enumerate(paths) if n != m)


def _document(file: StartFile) -> dict[str, Any]:
    return {
        "path": file.path,
        "object": file.object,
        "sha256": file.sha256,
        "size": file.size,
        "mode": f"{file.mode:04o}",
        "secret": file.secret,
    }


def _file(doc: Any) -> StartFile:
    size = doc["size"]
    found = StartFile(
        absolute(_text(doc["path"])),
        _text(doc["object"]),
        _text(doc["sha256"]),
        size,
        int(_text(doc["mode"]), 8),
        doc["secret"] is True,
    )
    if not _OBJECT.fullmatch(found.object) or not _SHA256.fullmatch(found.sha256) or found.mode not in _MODES:
        raise ValueError(f"a file of it has an invalid object name, digest or mode: {found.path!r:.120}")
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= MOST_BYTES:
        raise ValueError(f"a file of it has an invalid size: {found.path!r:.120}")
    return found


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_FILES:
        raise ValueError(f"expected a list of at most {MOST_FILES}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or deceives(value):
        raise TypeError(f"expected plain text, found {value!r:.40}")
    return value


# -- where files may go ----------------------------------------------------------------------------------------------

USUAL_ROOTS = ("/workspace", "/app", "/data", "/mnt", "/srv", "/lambda/nfs")
"""Where rented pods keep code and data, besides the home directory. ``--allow DIR`` adds one."""
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

FILL = "PODWATCH_FILL_"
_KEY = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_.\-]*)[\"']?(?:\s*(?:=>|:=|[=:])\s*|\s+)(?:Bearer\s+|Basic\s+)?[\"']?$")
_EVERYWHERE = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "LANG", "TERM", "HOSTNAME", "TMPDIR", "SHLVL"}
)
"""Variables of every shell: this pod's value is not the other pod's."""
_PLAIN_VALUE = re.compile(r"[!#-&(-\[\]-~]+")
"""Printable ASCII without spaces, quotes and backslashes: it reads the same in TOML, JSON, YAML and env files."""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A value that the scrubber removed. ``names``: environment variables that fill it, the first one that is set
    wins; ``line`` counts from 1; ``at`` is its offset in the text."""

    line: int
    at: int
    key: str
    names: tuple[str, ...]


def placeholders(text: str, name: str, *, secret: bool, used: dict[str, int]) -> list[Placeholder]:
    """Every placeholder in a file called ``name``. ``used`` counts the variable names given out, over all files of a
    start: the second ``api_key`` is PODWATCH_FILL_API_KEY_2. A variable named in the file itself (``WANDB_API_KEY``)
    is also filled from the variable of that name."""
    found = []
    at = text.find(MASK)
    while at >= 0:
        begin = text.rfind("\n", 0, at) + 1
        match = _KEY.search(text[begin:at])
        key = match["key"] if match else ""
        base = re.sub(r"[^A-Z0-9]+", "_", (key or posixpath.splitext(name)[0]).upper()).strip("_") or "VALUE"
        used[base] = used.get(base, 0) + 1
        names = [FILL + base if used[base] == 1 else f"{FILL}{base}_{used[base]}"]
        variable = re.fullmatch(r"[A-Z][A-Z0-9_]*", key) and key not in _EVERYWHERE
        if variable and (secret or name_strength(key) == 2):
            names.append(key)
        found.append(Placeholder(text.count("\n", 0, at) + 1, at, key, tuple(names)))
        at = text.find(MASK, at + len(MASK))
    return found


def filled(
    text: str, found: Sequence[Placeholder], environ: Mapping[str, str], withheld: Collection[str] = ()
) -> tuple[str, dict[int, str]]:
    """``text`` with every placeholder filled that the environment has a value for, and for each of the others (by its
    offset) why it stays. ``withheld``: values that this file must not get, such as the store's key: whoever can write
    the bucket chose the names of the placeholders."""
    open_: dict[int, str] = {}
    pieces, done = [], 0
    for one in found:
        value = next((environ[name] for name in one.names if environ.get(name)), "")
        if value in withheld:
            open_[one.at] = f"podwatch keeps the value of {' or '.join(one.names)} to itself: write another by hand"
        elif not value:
            open_[one.at] = f"set {' or '.join(one.names)}"
        elif MASK in value or not _PLAIN_VALUE.fullmatch(value):
            open_[one.at] = (
                f"write it by hand: the value in {' or '.join(one.names)} contains a space, quote or the like"
            )
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
