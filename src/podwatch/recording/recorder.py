"""Records what was sensed, for ``podwatch replay``: off the event loop, limited on disk, and never a risk to the guard.

The loop passes snapshots on; a separate thread finds what changed, packs and writes it. A full, hung or missing disk
stops the recording with one complaint; recording is retried later, and the guard is not affected.
"""

import contextlib
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from podwatch.domain.snapshot import Snapshot
from podwatch.recording.codec import Mask
from podwatch.recording.format import SUFFIX, Header, SegmentWriter

SEGMENTS = 16
"""A new segment starts at this share of the total size, so that little is dropped at once."""
RETRY_SECONDS = 600.0
MAX_WAITING = 300
"""Turns queued for a slow disk: ten minutes at the default poll. They are small, because snapshots share their content.
"""
MIN_FREE_BYTES = 64 << 20
"""Free space below which recording stops: the rest of the disk is for the journal and the incident bundles."""
CLOSE_SECONDS = 3.0
_NAME = re.compile(r"(\d{8})-\d{8}T\d{6}Z" + re.escape(SUFFIX))


MakeHeader = Callable[[], Header]
"""Called at the start of a segment, in the recorder's thread."""
Complain = Callable[[str | None], None]
"""Called from the recorder's thread with one line when recording stops, and with ``None`` when it works again."""


class Recorder:
    """Writes each turn in a thread of its own."""

    def __init__(
        self,
        directory: Path,
        header: MakeHeader,
        *,
        max_size: int,
        mask: Mask = str,
        complain: Complain = lambda _: None,
    ) -> None:
        self._directory, self._header, self._max_size = directory, header, max_size
        self._mask, self._complain = mask, complain
        self._waiting: queue.Queue[tuple[Snapshot, bool, bool] | None] = queue.Queue(MAX_WAITING)
        self._cut = False
        self._missed = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._writer: SegmentWriter | None = None
        self._session = ""
        self._began_at = self._flushed_at = 0.0
        self._failed_at: float | None = None
        self._number = 0

    def turn(self, snapshot: Snapshot) -> None:
        """Record this turn. Never blocks, never raises; turns are left out while the disk is too slow."""
        if self._closing:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="podwatch-recording", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((snapshot, self._missed, self._cut))
            self._missed = self._cut = False
        except queue.Full:
            self._missed = True

    def cut(self) -> None:
        """The policies changed: the next turn starts a new segment with its own header."""
        self._cut = True

    def close(self, within: float = CLOSE_SECONDS) -> bool:
        """Write the rest. Blocks for at most ``within`` seconds; a hung disk is abandoned (False)."""
        self._closing = True
        if self._thread is None:
            return True
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=within)
        self._thread.join(within)
        return not self._thread.is_alive()

    # -- the thread

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            try:
                self._keep(*job)
            except Exception as error:  # no failure of the recording may harm the guard
                self._stop(job[0].at, error)
        with contextlib.suppress(OSError):
            self._end_segment()

    def _keep(self, snapshot: Snapshot, missed: bool, cut: bool) -> None:
        if self._failed_at is not None and snapshot.at - self._failed_at < RETRY_SECONDS:
            return
        if missed:
            self._session = ""  # turns are missing: the next turns do not continue the previous ones
        writer = self._writer
        if writer is not None and (
            missed
            or cut
            or writer.written >= self._max_size // SEGMENTS
            or snapshot.at - self._began_at >= 6 * 3600.0  # so that ``--since`` need not read days
        ):
            self._end_segment()
            writer = None
        if writer is None:
            writer = self._begin_segment(snapshot)
        writer.turn(snapshot)
        # A power cut or SIGKILL loses that much, but each flush worsens compression
        if snapshot.at - self._flushed_at >= 5.0:
            self._flushed_at = snapshot.at
            _room(self._directory)
            writer.flush()
        if self._failed_at is not None:
            self._failed_at = None
            self._tell(None)

    def _begin_segment(self, snapshot: Snapshot) -> SegmentWriter:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _room(self._directory)
        kept = self._make_room()
        self._session = self._session or secrets.token_hex(8)
        self._number = max([self._number, *kept]) + 1
        stamp = datetime.fromtimestamp(snapshot.wall, UTC).strftime("%Y%m%dT%H%M%SZ")
        header = replace(self._header(), session=self._session, wall=snapshot.wall)
        path = self._directory / f"{self._number:08d}-{stamp}{SUFFIX}"
        self._writer = SegmentWriter(path, header, self._mask)
        self._began_at = self._flushed_at = snapshot.at
        return self._writer

    def _end_segment(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _make_room(self) -> list[int]:
        """Remove the oldest segments of ours until another fits; returns the numbers of the remaining ones."""
        found = sorted((m[1], p) for p in self._directory.iterdir() if (m := _NAME.fullmatch(p.name)))
        sizes = {path: path.lstat().st_size for _, path in found}
        total, limit = sum(sizes.values()), self._max_size - self._max_size // SEGMENTS
        for _, path in found:
            if total <= limit:
                break
            path.unlink()
            total -= sizes[path]
        return [int(number) for number, _ in found]

    def _stop(self, at: float, error: Exception) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.abandon()
                if not writer.turns:
                    writer.path.unlink()
        self._session = ""
        first = self._failed_at is None
        self._failed_at = at
        if first:
            reason = (error.strerror if isinstance(error, OSError) else "") or str(error)
            self._tell(
                f"recording for `podwatch replay` has stopped: {reason} ({self._directory}); podwatch tries again every"
                f" {RETRY_SECONDS / 60:.0f} min; training stays guarded"
            )

    def _tell(self, problem: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            self._complain(problem)


def _room(directory: Path) -> None:
    there = os.statvfs(directory)
    if there.f_bavail * there.f_frsize < MIN_FREE_BYTES:
        raise OSError(None, f"less than {MIN_FREE_BYTES >> 20} MiB are free")
