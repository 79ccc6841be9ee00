"""Sends the pieces of one save by the transfer child, and knows how far it is."""

import asyncio
import contextlib
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import Outbox, OutgoingSave
from podwatch.config.settings import Settings
from podwatch.domain.errors import HostError
from podwatch.store.interfaces import list_save
from podwatch.store.keys import pieces
from podwatch.store.objects.access import access_for
from podwatch.store.transfer.job import TransferJob, stored_pieces
from podwatch.store.transfer.start import Transfer
from podwatch.system.blocking_calls import Worker

NICE = 15
"""Of an upload that nothing waits for: it uses the share of the CPU that training leaves."""
RATE_SECONDS = 10.0
"""Over how long the rate is measured."""


class UploadStopped(HostError):  # noqa: N818
    """The upload was ended on purpose."""


@dataclass(slots=True)
class InFlight:
    """The upload in progress, in bytes. ``before``: of pieces that were stored already."""

    step: int
    before: int
    total: int
    moved: int = 0
    seen: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def sent(self) -> int:
        return min(self.before + self.moved, self.total)

    def note(self, moved: int) -> None:
        now = time.monotonic()
        self.moved = moved
        self.seen.append((now, moved))
        while len(self.seen) > 2 and now - self.seen[0][0] > RATE_SECONDS:
            self.seen.popleft()

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before the first figures."""
        if len(self.seen) < 2:
            return None
        (began, first), (ended, last) = self.seen[0], self.seen[-1]
        return (last - first) / (ended - began) if ended > began and last > first else None


class Uploads:
    """Loop-side object. One upload at a time."""

    def __init__(self, settings: Settings, connection: StoreConnection, outbox: Outbox) -> None:
        self._settings, self._connection, self._outbox = settings, connection, outbox
        self._worker = Worker("upload")
        self._running: Transfer | None = None
        self.in_flight: InFlight | None = None
        self._stopped = ""
        self._children = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def stop(self, why: str) -> None:
        """End the upload in progress; ``send`` then raises UploadStopped."""
        self._stopped = why
        if self._running is not None:
            self._running.kill()

    async def send(self, save: OutgoingSave, *, urgent: bool = False) -> dict[str, str]:
        """Send what the store lacks; the hash of each object, by name. Raises SourceChanged or SourceForeign where the
        save is void, UploadStopped, or what the store raises. ``urgent``: it gives way to nothing."""
        self._stopped = ""
        done = await self._already_stored(save)
        sizes = {piece.name: piece.size for piece in pieces(save.files, save.piece_size)}
        if len(done) < len(sizes):
            before = sum(sizes[name] for name in done)
            await self._move(self._job(save, done, urgent=urgent), save, InFlight(save.step, before, save.total_bytes))
        return {name: line.hash for name, line in (await self._worker.call(self._outbox.sent, save)).items()}

    async def _already_stored(self, save: OutgoingSave) -> tuple[str, ...]:
        """The names of pieces that a line of the local list and the listing prove."""
        lines = await self._worker.call(self._outbox.sent, save)
        if not lines:
            return ()
        folder = self._connection.keys.save(*save.stored_key)
        there = await self._connection.call(lambda store: list_save(store, folder))
        return stored_pieces(save.files, save.piece_size, lines, there)

    def _job(self, save: OutgoingSave, done: tuple[str, ...], *, urgent: bool) -> TransferJob:
        """Without its roots, which are opened when it starts."""
        sync, rights = self._settings.sync, self._outbox.workspace.tree.rights
        owner = os.geteuid() if rights is None else rights.uid
        return TransferJob(
            "send", sync.store, self._connection.keys.save(*save.stored_key), save.files, save.piece_size, {},
            done=done, sent=str(self._outbox.sent_path(save)), alone=str(self._outbox.directory),
            connections=sync.connections, rate=float(sync.max_rate or 0), nice=0 if urgent else NICE,
            user=-1 if rights is None else rights.uid, owners=None if save.linked else (owner,),
        )  # fmt: skip

    async def _move(self, job: TransferJob, save: OutgoingSave, flight: InFlight) -> None:
        self.in_flight = flight
        self._idle.clear()
        self._children += 1
        who, loop = f"upload {self._children}", asyncio.get_running_loop()

        def heard(message: dict[str, Any]) -> None:
            self._connection.count(who, message.get("calls") or {})
            if message.get("type") == "progress":
                with contextlib.suppress(RuntimeError):  # the loop is closed: podwatch is leaving
                    loop.call_soon_threadsafe(flight.note, int(message["bytes"]))

        def run() -> None:
            with self._outbox.roots(save) as roots:
                self._running = transfer = Transfer(replace(job, roots=dict(roots)))
                if self._stopped:
                    transfer.kill()
                try:
                    transfer.run(access_for(self._settings), heard)
                finally:
                    self._running = None

        try:
            await self._worker.call(run)
        except asyncio.CancelledError:
            self.stop("podwatch is leaving")
            raise
        except HostError as error:
            if self._stopped:
                raise UploadStopped(self._stopped, where=f"step {save.step}") from error
            raise
        finally:
            self.in_flight = None
            self._idle.set()

    async def ended(self) -> None:
        """Once no upload runs any more."""
        await self._idle.wait()

    def close(self) -> None:
        self.stop("podwatch is leaving")
        self._worker.close()
