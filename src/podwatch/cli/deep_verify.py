"""``podwatch checkpoints verify --deep``: compare every byte on this pod with the manifests in the store, and with the
trainer's own checksums if there are any.

Runs in the command's process, not in the daemon: hashing 47 GB must not delay detection.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from podwatch.cli.common import Where
from podwatch.client.format import size
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, UsageError

if TYPE_CHECKING:
    from podwatch.domain.manifest import Manifest
    from podwatch.stores.base import ObjectStore

T = TypeVar("T")

_TELL_SECONDS = 0.5
_NICE = 19


def check_deep(where: Where, step: int | None, *, quiet: bool) -> list[dict[str, Any]]:
    """One document per checkpoint: structure first, then bytes. ``compared`` is false if there are no hashes to compare
    with; the notes give the reason."""
    from podwatch.checkpoints.hash_check import INTEGRITY, compare, compare_own
    from podwatch.cli.offline import load, look
    from podwatch.reporting.documents import inspection_document

    settings = load(where)
    catalogue = look(settings)
    wanted = [s for s in catalogue.sets if s.step == step or (s.complete and step is None)]
    if step is not None and not wanted:
        raise UsageError(f"checkpoint of step {step} not found", fix="`podwatch checkpoints` lists them")
    results = []
    store = _open(settings) if settings.sync.store else None
    try:
        for found in reversed(wanted):
            try:
                looked = catalogue.inspect(found.step)
                contents = catalogue.contents(found.step)
            except HostError:
                continue  # removed meanwhile
            manifest, why = _manifest(store, settings, found.step, contents.set.save_id)
            with _progress(found.step, contents.set.size_bytes, quiet=quiet) as tell:
                own = _gently(partial(compare_own, contents, tell))
            document = inspection_document(found.step, looked.problems, looked.notes, looked.files)
            document["compared"] = manifest is not None or own is not None
            if own is not None:
                document["reasons"] += own.problems
                document["notes"].append(f"compared {own.files} files with the trainer's own {INTEGRITY}")
                document["bytes_compared"] = own.size_bytes
            if manifest is None:
                document["notes"].append(why)
            else:
                with _progress(found.step, manifest.total_bytes, quiet=quiet) as tell:
                    compared = _gently(partial(compare, contents, manifest, tell))
                document["reasons"] += compared.problems
                document["bytes_compared"] = max(compared.size_bytes, document.get("bytes_compared", 0))
            document["sound"] = not document["reasons"]
            results.append(document)
    finally:
        if store is not None:
            store.close()
    if store is None and not any(r["compared"] for r in results):
        raise ConfigurationError(
            "no hashes to compare with: no store is configured and the trainer wrote no checksums",
            where="[sync] store",
            fix="run `podwatch checkpoints verify` without --deep to check the structure",
        )
    return sorted(results, key=lambda r: int(r["step"]))


def _gently(work: Callable[[], T]) -> T:
    """The result of ``work()``, run in a thread of lowest priority so that training keeps the cores. Only for reading
    bytes: on a busy pod, imports and store requests would take minutes at this priority."""
    answers: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        try:
            answers.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)  # so that Ctrl-C ends it
    thread.start()
    while thread.is_alive():
        thread.join(_TELL_SECONDS)
    if failures:
        raise failures[0]
    return answers[0]


def _open(settings: Any) -> "ObjectStore":
    from podwatch.stores.credentials import credentials_from_environment
    from podwatch.stores.open import open_store

    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    credentials = credentials_from_environment(
        os.environ, settings.trainer.env_file, Path(directory) if directory else None
    )
    return open_store(settings.sync.store, credentials, writer_id="verify")


def _manifest(store: "ObjectStore | None", settings: Any, step: int, save_id: str) -> "tuple[Manifest | None, str]":
    """The manifest of this save, or the reason why there is none."""
    from podwatch.sync.publish import checked_manifest
    from podwatch.sync.upload.job import keys_for

    if store is None:
        return None, "bytes not compared: no store is configured, so there are no hashes from an upload"
    if not save_id:
        return None, "bytes not compared: this checkpoint is incomplete and was never uploaded"
    keys = keys_for(settings.sync.store, settings.run_id)
    key = keys.manifest(step, save_id)
    try:
        data = store.get_bytes(key)
        if data is None:
            return None, f"bytes not compared: the store has no manifest of this save ({save_id})"
        return checked_manifest(keys, data, step, save_id, where=f"{store.url}/{key}"), ""
    except PodwatchError as error:
        return None, f"bytes not compared: {error}"


@contextlib.contextmanager
def _progress(step: int, total: int, *, quiet: bool) -> "Any":
    """A progress line on standard error, redrawn twice a second."""
    done, last = 0, 0.0

    def tell(count: int) -> None:
        nonlocal done, last
        done += count
        now = time.monotonic()
        if not quiet and now - last >= _TELL_SECONDS:
            last = now
            sys.stderr.write(f"\rstep {step}: {size(done)} of {size(total)} compared ")
            sys.stderr.flush()

    call: Callable[[int], None] = tell
    try:
        yield call
    finally:
        if not quiet:
            sys.stderr.write("\r" + " " * 60 + "\r")
