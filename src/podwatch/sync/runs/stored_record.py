"""Reads a run as a record from the store: its summary, what it was started with, and what is left of it. Reads only;
one listing, the heartbeat, the pointer, and for ``show`` and ``diff`` the stored start."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podwatch.client.times_and_sizes import from_rfc3339
from podwatch.domain.earlier_attempts import LastEnd, parse_verdict
from podwatch.domain.errors import HostError, IntegrityError, RemoteError, SaveGone
from podwatch.domain.manifest import Keys
from podwatch.domain.secrets import scrub_argv
from podwatch.policy.run_summary import Summary, Texts, summarize
from podwatch.stores.base import ObjectStore
from podwatch.sync.publish import newest_pointer, read_manifest
from podwatch.sync.runs.bootstrap import fetch

SMALL_JSON = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredRun:
    """``steps``: of the checkpoints that the store holds. ``last``: the last verdict of a job."""

    summary: Summary
    texts: Texts = field(default_factory=Texts)
    newest_step: int | None = None
    steps: tuple[int, ...] = ()
    size_bytes: int = 0
    layout: str = ""
    lineage: str = ""
    wandb: Mapping[str, str] = field(default_factory=dict)
    heartbeat_wall: float | None = None
    last: LastEnd | None = None


def read_summary(
    store: ObjectStore, keys: Keys, *, began_wall: float | None = None
) -> tuple[Summary, float | None, dict[str, Any]]:
    """The summary by the heartbeat, when that was written, and its document. ``began_wall``: the oldest object known.
    Raises RemoteError."""
    document: Any = None
    written: float | None = None
    with contextlib.suppress(IntegrityError):
        found = store.read(keys.heartbeat, limit=SMALL_JSON)
        if found is not None:
            written = found[0].uploaded_wall
            with contextlib.suppress(ValueError, RecursionError):
                document = json.loads(found[1])
    beat = document if isinstance(document, dict) else {}
    account = beat.get("account")
    since = from_rfc3339(account.get("since")) if isinstance(account, dict) else None
    return summarize(keys.run_id, beat, began_wall=began_wall, written_wall=written, since=since), written, beat


def read_run(store: ObjectStore, keys: Keys) -> StoredRun:
    """HostError where podwatch has written nothing of this run; RemoteError if the store does not answer."""
    oldest: float | None = None
    steps: dict[int, None] = {}
    size = count = 0
    for item in store.list(f"{keys.root}/"):
        if item.ours is False:
            continue
        count += 1
        size += item.size
        oldest = item.uploaded_wall if oldest is None else min(oldest, item.uploaded_wall)
        name = item.key.removeprefix(f"{keys.root}/step_")
        if name != item.key and name.endswith("/manifest.json") and name.partition("/")[0].isdigit():
            steps[int(name.partition("/")[0][:18])] = None
    if not count:
        raise HostError(
            f"the store holds nothing of run {keys.run_id}",
            where=f"{store.url}: {keys.root}/",
            fix="`podwatch runs list` shows the runs",
        )
    summary, written, _ = read_summary(store, keys, began_wall=oldest)
    problems: list[str] = []
    command, newest, layout, lineage, wandb = _newest(store, keys, problems)
    texts = _texts(store, keys, command, problems)
    return StoredRun(
        summary, texts, newest, tuple(sorted(steps)), size, layout, lineage, wandb, written, _last_end(store, keys)
    )


def _newest(
    store: ObjectStore, keys: Keys, problems: list[str]
) -> tuple[tuple[str, ...], int | None, str, str, Mapping[str, str]]:
    """Command, step, layout, lineage and W&B ids of the checkpoint that latest.json names."""
    try:
        pointer = newest_pointer(store, keys)
        if pointer is None or pointer.step is None:
            problems.append("no checkpoint is stored, so the command of a start is not known")
            return (), None, "", "", {}
        manifest = read_manifest(store, keys, pointer)
    except (IntegrityError, SaveGone) as error:
        problems.append(f"latest.json is not usable: {error.what}")
        return (), None, "", "", {}
    return (
        tuple(scrub_argv(manifest.train_command)),
        pointer.step,
        manifest.layout,
        pointer.lineage,
        dict(pointer.wandb),
    )


def _texts(store: ObjectStore, keys: Keys, command: tuple[str, ...], problems: list[str]) -> Texts:
    try:
        fetched = fetch(store, keys)
    except SaveGone:
        problems.append("no configuration is stored (an older podwatch, or [sync] artefacts = false)")
        return Texts(command, problems=tuple(problems))
    except IntegrityError as error:
        problems.append(f"the stored configuration is not usable: {error.what}")
        return Texts(command, problems=tuple(problems))
    record = fetched.record
    files = {one.path: fetched.texts[one.object] for one in (record.config, *record.files)}
    problems += [f"{path} is not stored: {reason}" for path, reason in record.left_out]
    return Texts(command, files, record.settings, tuple(problems))


def _last_end(store: ObjectStore, keys: Keys) -> LastEnd | None:
    with contextlib.suppress(IntegrityError):
        try:
            return parse_verdict(store.get_bytes(keys.verdict, limit=SMALL_JSON)).last
        except RemoteError as error:
            if error.transient:
                raise
    return None
