"""Checkpoints of a run whose nodes have disks of their own: what each node lists of its disk, what node 0 asks the
others to upload, and what they have uploaded (docs/nodes.md). Pure.

Data from a shared directory is never trusted: parsing drops a document that is not what it should be.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import IntegrityError
from podwatch.domain.safe_names import check_relative_path
from podwatch.domain.secrets import scrub

MOST_FILES: Final = 100_000
"""Files of all checkpoints on one node."""
LONGEST: Final = 300


StepDigests = Mapping[int, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class NodeStep:
    """The files of one step on one node's disk, sorted. ``settled``: nothing changed for the settle time, and each file
    was checked (``FileEntry.problem``)."""

    step: int
    files: tuple[FileEntry, ...]
    settled: bool = False

    @property
    def digest(self) -> str:
        """Identifies the files: names, sizes and times."""
        return digest_of(self.files)

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong with each file that is not whole."""
        return tuple(f.problem for f in self.files if f.problem)


@dataclass(frozen=True, slots=True)
class NodeList:
    """All checkpoints on one node's disk. ``process`` as in ``domain.nodes.Report``. ``problem``: why the list is not
    complete; empty if it is."""

    rank: int
    process: str
    steps: tuple[NodeStep, ...] = ()
    problem: str = ""

    def of(self, step: int) -> NodeStep:
        return next((one for one in self.steps if one.step == step), NodeStep(step, (), settled=True))


@dataclass(frozen=True, slots=True)
class UploadOrder:
    """Node 0 asks other nodes to upload their files of one checkpoint. ``number`` grows with each order.
    ``digests``: rank -> digest of all files of this step on its disk; ``paths``: rank -> the ``<part>/<path>`` of those
    that it shall upload. ``again``: those of them that the store lacks although the node reported them."""

    number: int
    step: int
    save_id: str
    writer_id: str
    digests: Mapping[int, str]
    paths: Mapping[int, tuple[str, ...]]
    again: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeOrders:
    """Written by node 0 alone. ``process``: its own. ``complete``: the checkpoints that node 0 has found complete;
    ``gone``: those whose part it has deleted, so that the others shall delete theirs. Each as step -> rank -> digest of
    the files of that node. ``mark`` grows: a node's look at its disk that begins after it has read one shows what was
    there after node 0 had written it. ``stored``: those of ``complete`` that are whole in the store; ``newest``: the
    newest step of this lineage there, -1 for none. ``abandoned``: (step, save id) of uploads that were given up."""

    process: str
    mark: int = 0
    upload: UploadOrder | None = None
    complete: StepDigests = field(default_factory=dict)
    gone: StepDigests = field(default_factory=dict)
    stored: tuple[int, ...] = ()
    newest: int = -1
    abandoned: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class SentFile:
    """One file that a node has uploaded; as ``journal.upload_records.UploadedObject``."""

    path: str
    size: int
    mtime_ns: int
    mode: int
    key: str
    file_id: str
    parts_sha1: tuple[str, ...]
    parts_xxh3: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SentFiles:
    """A node's answer to one order. ``sent``: bytes that are in the store. ``done``: ``files`` are all that were asked
    for. ``failed``: why the node cannot send them; ``changed``: because they are not the files of the order any
    more."""

    process: str
    number: int
    sent: int = 0
    done: bool = False
    failed: str = ""
    changed: bool = False
    files: tuple[SentFile, ...] = ()


def digest_of(files: Sequence[FileEntry]) -> str:
    found = hashlib.sha256()
    for f in sorted(files):
        found.update(f"\0{f.part}/{f.path}\0{f.size}\0{f.mtime_ns}".encode("utf-8", "surrogateescape"))
    return found.hexdigest()[:32]


# -- as documents ------------------------------------------------------------------------------------------------------


def list_document(found: NodeList, run_id: str) -> bytes:
    steps = [
        {
            "step": s.step,
            "settled": s.settled,
            "files": [[f.part, f.path, f.size, f.mtime_ns, f.mode, f.problem] for f in s.files],
        }
        for s in found.steps
    ]
    return _bytes(
        {"run_id": run_id, "rank": found.rank, "process": found.process, "problem": found.problem, "steps": steps}
    )


def parse_list(data: bytes, run_id: str) -> NodeList | None:
    try:
        doc = _object(data, run_id)
        rank, process = _whole(doc["rank"]), _text(doc["process"])
        steps = tuple(_step(s, rank) for s in _many(doc["steps"]))
        return NodeList(rank, process, steps, _text(doc.get("problem", "")))
    except (KeyError, TypeError, ValueError, IntegrityError):
        return None


def _step(found: Any, rank: int) -> NodeStep:
    """A name that no store can hold is no reason to drop the other steps: this one never settles."""
    step = _whole(found["step"])
    try:
        files = tuple(sorted(_entry(f, rank) for f in _many(found["files"])))
    except (TypeError, ValueError, IntegrityError):
        return NodeStep(step, ())
    return NodeStep(step, files, found.get("settled") is True)


def _entry(found: Any, rank: int) -> FileEntry:
    part, path, size, mtime, mode, problem = found
    check_relative_path(f"{_text(part)}/{_text(path)}")
    entry = FileEntry(_text(path), _text(part), _whole(size), _signed(mtime), _whole(mode) & 0o777)
    return replace(entry, node=rank, problem=scrub(_text(problem)[:LONGEST]))


def orders_document(orders: NodeOrders, run_id: str) -> bytes:
    upload = None if orders.upload is None else asdict(orders.upload)
    steps = {"complete": orders.complete, "gone": orders.gone, "stored": orders.stored, "newest": orders.newest}
    head = {"run_id": run_id, "process": orders.process, "mark": orders.mark}
    return _bytes({**head, "upload": upload, **steps, "abandoned": orders.abandoned})


def parse_orders(data: bytes, run_id: str) -> NodeOrders | None:
    try:
        doc = _object(data, run_id)
        upload = doc.get("upload")
        complete, gone = (
            {int(step): _ranks(ranks) for step, ranks in dict(doc.get(name, {})).items()}
            for name in ("complete", "gone")
        )
        return NodeOrders(
            _text(doc["process"]),
            _whole(doc.get("mark", 0)),
            None if upload is None else _upload(upload),
            complete,
            gone,
            tuple(_whole(step) for step in _many(doc.get("stored", []))),
            _signed(doc.get("newest", -1)),
            tuple((_whole(step), _text(save_id)) for step, save_id in _many(doc.get("abandoned", []))),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _upload(doc: Mapping[str, Any]) -> UploadOrder:
    return UploadOrder(
        _whole(doc["number"]),
        _whole(doc["step"]),
        _text(doc["save_id"]),
        _text(doc["writer_id"]),
        _ranks(doc["digests"]),
        {int(rank): tuple(_text(p) for p in _many(paths)) for rank, paths in dict(doc["paths"]).items()},
        tuple(_text(p) for p in _many(doc.get("again", []))),
    )


def sent_document(sent: SentFiles, run_id: str) -> bytes:
    return _bytes({"run_id": run_id, **asdict(sent)})


def parse_sent(data: bytes, run_id: str) -> SentFiles | None:
    try:
        doc = _object(data, run_id)
        files = tuple(
            SentFile(
                check_relative_path(_text(f["path"])),
                _whole(f["size"]),
                _signed(f["mtime_ns"]),
                _whole(f["mode"]) & 0o777,
                _text(f["key"]),
                _text(f["file_id"]),
                tuple(_text(h) for h in _many(f["parts_sha1"])),
                tuple(_text(h) for h in _many(f.get("parts_xxh3", []))),
            )
            for f in _many(doc.get("files", []))
        )
        return SentFiles(
            _text(doc["process"]),
            _whole(doc["number"]),
            _whole(doc.get("sent", 0)),
            doc.get("done") is True,
            scrub(_text(doc.get("failed", ""))[:LONGEST]),
            doc.get("changed") is True,
            files,
        )
    except (KeyError, TypeError, ValueError, IntegrityError):
        return None


def _ranks(doc: Any) -> dict[int, str]:
    return {int(rank): _text(digest) for rank, digest in dict(doc).items()}


def _bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document) + "\n").encode()


def _object(data: bytes, run_id: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    if not isinstance(found, dict) or found.get("run_id") != run_id:
        raise ValueError("not of this run")
    return found


def _many(found: Any) -> list[Any]:
    if not isinstance(found, list) or len(found) > MOST_FILES:
        raise TypeError("expected a list")
    return found


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError("expected text")
    return found


def _whole(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 1 << 62:
        raise TypeError("expected a whole number")
    return found


def _signed(found: Any) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or abs(found) >= 1 << 63:
        raise TypeError("expected a number")
    return found
