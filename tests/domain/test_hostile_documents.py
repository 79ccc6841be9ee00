"""Every document that a stranger can write: with any value at any place, it is a document or one error."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from podwatch.checkpoints.records import CheckpointRecord, RecordedFile
from podwatch.controller.records import ControllerRecords, MachineRecord
from podwatch.controller.run_view import ControllerClaim
from podwatch.domain.account_document import AccountTotals
from podwatch.domain.checkpoint import FileEntry, SymlinkEntry
from podwatch.domain.document import Document
from podwatch.domain.earlier_attempts import BadHost, Host, LastEnd, OpenAttempt, RunVerdict, Suspect
from podwatch.domain.engine_and_attempt import Instance
from podwatch.domain.errors import IntegrityError
from podwatch.domain.lease import (
    ClaimDocument,
    Control,
    Heartbeat,
    HeartbeatEnd,
)
from podwatch.domain.nodes import GangEnd, GangRecord, NodeFailure, Report
from podwatch.domain.status_document import Status
from podwatch.recording.last_day import Moment
from podwatch.report.status import build_status
from podwatch.store.documents import (
    RunPointer,
    SaveExports,
    SaveIntent,
    SaveManifest,
)
from podwatch.store.runs.read import ArchiveRecord
from podwatch.store.runs.start_record import LeftOut, StartFile, StoredStart
from tests.report import views

HOST, SHA, WHERE = Host("m", "n", ("GPU-1",)), "sha1:" + "a" * 40, Instance("slurm", "7", "0", "n1", "label")
MACHINE = MachineRecord(3, 2.0, 1.0, "m", 1.0)
FILE = StartFile("/root/a.toml", "aa-a.toml", "a" * 64, 3, "0755", True)
SAMPLES: list[Document] = [
    SaveIntent(
        "run", 40, "save", "w", 3, 1.0, "dcp", 100, (FileEntry("a", "part", 3, 5),), (SymlinkEntry("b", "part", "a"),)
    ),
    SaveManifest(
        "run", 40, "save", "w", 3, 1.0, "dcp", 100, (FileEntry("a", "part", 3, 5, hashes=(SHA,)),),
        (SymlinkEntry("b", "part", "a"),), 7, "line", "start-1", 20, 4, "digest", ("uv", "run"), {"shared": "x"},
    ),
    SaveExports("run", 40, "save", 1.0, (FileEntry("a", "weights", 3, 5, hashes=(SHA,)),), True),
    RunPointer("run", 3, 7, 40, "w", 1.0, "save", SHA, 9, 3, "line", "dcp", "pod-1", {"shared": "x"}),
    ClaimDocument("w", "m", "b", "p", "pod-1", WHERE, "process", 3, "nonce", "now"),
    Heartbeat(
        "w", "m", "b", "p", "pod-1", WHERE, "process", step=40, step_wall=1.0, written_wall=2.0, outcome="stopped",
        end=HeartbeatEnd("stopped", 65, "command", "text"), account=AccountTotals(failures=3),
        last_digest_at="now",
    ),
    Control("stopped", "why"),
    RunVerdict(
        "digest", LastEnd(65, "gave-up", "why", "command", 1.0, 40, "pod-1", WHERE), 2, 1.0, 2.0, 40, "line",
        OpenAttempt("id", 1.0, "pod-1", True), (BadHost(HOST, "why", 1.0, 2.0, 1),), "job", Suspect(HOST, 2),
    ),
    GangRecord(3, "attempt", 2, ("p0", "p1"), True, 40, "hash", run_id="run"),
    Report(
        1, "p1", "attempt", "pod-1", 3, 9, "running", 40, 1.5, NodeFailure("exit", "text", "command", "line", True),
        True, GangEnd("gave-up", "why", "machine", 1, HOST, True), True, True, HOST, run_id="run",
    ),
    ArchiveRecord("run", "latest", 1.0, "pod-1"),
    StoredStart("run", "/app", FILE, (FILE,), (LeftOut("/x", "large"),), {"a": "b"}, "podwatch"),
    ControllerClaim("run", "controller", "host", 3, 1.0),
    ControllerRecords("run", "tag", "controller", 1.0, (MACHINE,)),
    Status.from_json(build_status(views.after_recovery())),
    CheckpointRecord(40, "save", "hf", "boot", (RecordedFile("part", "a", 9, 1),), 1.0, {"part": 9}, 3),
    Moment(1.0, "running", True, ((0, 1, 2),), (1, 2), 3, 40, 1.0, 0.5, -0.5),
]  # fmt: skip
HOSTILE: list[Any] = [
    None, True, -1, 0, 2**63, 10**300, 0.5, -1e308, "", "x", "7", "\x1b[2J", "a\nb", "\u202ex", "../../etc", "/",
    "x" * 3000, [], [None], ["x"], [[]], {}, {"x": 1}, {"": {"": []}},
]  # fmt: skip


def variants(value: Any) -> Iterator[Any]:
    """The value with one place in it replaced by each hostile value, or left out."""
    yield from HOSTILE
    if isinstance(value, dict):
        for name in value:
            yield {key: inner for key, inner in value.items() if key != name}
            yield from ({**value, name: inner} for inner in variants(value[name]))
    if isinstance(value, list) and value:
        yield from ([inner, *value[1:]] for inner in variants(value[0]))
        yield value * 2


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_any_value_at_any_place(sample: Document) -> None:
    kind, whole = type(sample), json.loads(sample.to_bytes())
    assert kind.from_bytes(sample.to_bytes()) == sample
    refused: list[IntegrityError] = []
    for variant in variants(whole):
        try:
            found = kind.from_bytes(json.dumps(variant).encode(), where="there")
        except IntegrityError as error:
            refused.append(error)
        else:
            assert kind.from_bytes(found.to_bytes()) == found
    assert len(refused) > 50
    assert {error.where for error in refused} == {"there"}
    for what in (error.what for error in refused):
        assert kind.FILE in what
        assert what.isprintable()
        assert len(what) < 500
