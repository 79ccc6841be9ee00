"""The run record: one small file beside output_dir, enough to continue the run when the pod's own disk is gone.

Replaced by rename, so that it is always the old one or the new one. A spare file of the same size is beside it: the
next version is written into its existing blocks, so that "training was stopped on purpose" can be recorded on a full
disk too.
"""

import contextlib
import errno
import json
from typing import Any, Final

from podwatch.domain.errors import HostError, PermissionDenied
from podwatch.domain.run import RECORD_SCHEMA_VERSION, EarlierSave, Lineage, RunRecord, StartRecord
from podwatch.domain.snapshot import Desired
from podwatch.system.own_directories import Workspace

SPARE_BYTES: Final = 16_384
"""A record is 1-4 KiB; the rest is for long commands."""
MAX_BYTES: Final = 1 << 20
MODE: Final = 0o600
"""The command in the record is scrubbed, but not every secret of a custom trainer can be recognized."""


def load_run_record(workspace: Workspace, *, looking: bool = False) -> RunRecord | None:
    """The record, or None if there is none. A damaged one is moved to ``<name>.corrupt-<n>`` (with ``looking`` it
    stays), and None is returned. Never blocks on a file that is not regular.

    Raises HostError if a newer podwatch wrote it, PermissionDenied if podwatch cannot read it, RootReplaced if it or
    its directory belongs to another user or was replaced: such a record is never trusted.
    """
    path = workspace.record
    try:
        data = workspace.tree.read_ours(path, MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise PermissionDenied("cannot read the run record", where=str(path), fix=_OWN) from error
    except OSError as error:
        if error.errno not in _NO_RECORD:
            raise HostError(f"the run record cannot be read: {error.strerror}", where=str(path)) from error
        data = b""
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise TypeError("not an object")
        version = document["schema_version"]
        if isinstance(version, int) and version > RECORD_SCHEMA_VERSION:
            raise HostError(
                f"the run record has schema {version}, this podwatch knows {RECORD_SCHEMA_VERSION}",
                where=str(path),
                fix="use the newer podwatch again",
            )
        return _record(document)
    except (ValueError, TypeError, KeyError, AttributeError):
        if not looking:
            _move_aside(workspace)
        return None


def save_run_record(workspace: Workspace, record: RunRecord) -> None:
    """Durable when it returns (file and directory are synced). Raises HostError or PermissionDenied."""
    data = (json.dumps(_document(record), indent=1, sort_keys=True) + "\n").encode()
    tree, path = workspace.tree, workspace.record
    spare = path.with_name(path.name + ".spare")
    try:
        tree.make(path.parent, 0o755)
        tree.overwrite(spare, data, MODE)
        tree.replace(spare, path)
        tree.sync(path.parent)
    except PermissionError as error:
        raise PermissionDenied("cannot write the run record", where=str(path), fix=_OWN) from error
    except OSError as error:
        raise HostError(
            f"the run record cannot be written: {error.strerror}", where=str(path), fix="free some space on its disk"
        ) from error
    with contextlib.suppress(OSError):  # without a spare the next write needs free space
        tree.reserve(spare, SPARE_BYTES, MODE)


_OWN: Final = "make its directory belong to podwatch's user"


_NO_RECORD: Final = (errno.EINVAL, errno.EFBIG, errno.ELOOP, errno.ENXIO)
"""A FIFO, a device, a link, or much larger than any record: damaged."""


def _move_aside(workspace: Workspace) -> None:
    path, number = workspace.record, 1
    with contextlib.suppress(OSError):
        while True:
            try:
                workspace.tree.rename(path, path.with_name(f"{path.name}.corrupt-{number}"))
            except FileExistsError:
                number += 1
            else:
                return


def _document(record: RunRecord) -> dict[str, Any]:
    start = record.last_start
    return {
        "schema_version": record.schema_version,
        "kind": "podwatch-run",
        "run_id": record.run_id,
        "lineage": {
            "id": record.lineage.id,
            "parent": record.lineage.parent,
            "parent_step": record.lineage.parent_step,
            "left_step": record.lineage.left_step,
            "opened_wall": record.lineage.opened_wall,
        },
        "earlier": [
            {"step": e.step, "save_id": e.save_id, "changed_wall": e.changed_wall, "lineage": e.lineage}
            for e in record.earlier
        ],
        "desired": str(record.desired),
        "desired_wall": record.desired_wall,
        "stop_above": record.stop_above,
        "stop_of": record.stop_of,
        "first_seen_wall": record.first_seen_wall,
        "wandb": record.wandb,
        "last_start": None
        if start is None
        else {
            "start_id": start.start_id,
            "wall": start.wall,
            "argv": list(start.argv),
            "cwd": start.cwd,
            "user": start.user,
            "step": start.step,
            "environment_names": list(start.environment_names),
            "config_digests": [list(pair) for pair in start.config_digests],
            "command": list(start.command),
        },
    }


def _record(doc: dict[str, Any]) -> RunRecord:
    if doc["kind"] != "podwatch-run":
        raise ValueError("not a run record")
    start = doc.get("last_start")
    lineage = doc["lineage"]
    return RunRecord(
        run_id=_text(doc["run_id"]),
        lineage=Lineage(
            _text(lineage["id"]),
            _text(lineage.get("parent", "")),
            _step(lineage.get("parent_step")),
            _step(lineage.get("left_step")),
            float(lineage.get("opened_wall", 0.0)),
        ),
        desired=Desired(doc["desired"]),
        last_start=None if start is None else _start(start),
        first_seen_wall=float(doc.get("first_seen_wall", 0.0)),
        wandb={_text(k): _text(v) for k, v in doc.get("wandb", {}).items()},
        stop_above=_step(doc.get("stop_above")),
        stop_of=_text(doc.get("stop_of", "")),
        desired_wall=float(doc.get("desired_wall", 0.0)),
        earlier=tuple(
            EarlierSave(int(e["step"]), _text(e["save_id"]), float(e["changed_wall"]), _text(e["lineage"]))
            for e in doc.get("earlier", [])
        ),
        schema_version=RECORD_SCHEMA_VERSION,
    )


def _start(doc: dict[str, Any]) -> StartRecord:
    return StartRecord(
        start_id=_text(doc["start_id"]),
        wall=float(doc["wall"]),
        argv=tuple(_text(a) for a in doc["argv"]),
        cwd=_text(doc["cwd"]),
        user=_text(doc.get("user", "")),
        step=_step(doc.get("step")),
        environment_names=tuple(_text(n) for n in doc.get("environment_names", [])),
        config_digests=tuple((_text(name), _text(digest)) for name, digest in doc.get("config_digests", [])),
        command=tuple(_text(word) for word in doc.get("command", [])),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


def _step(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("expected a step number")
    return value
