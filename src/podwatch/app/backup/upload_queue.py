"""What is on its way to the store: which checkpoint is sent next, what was begun, what is not sent and why.

The newest complete checkpoint, an interrupted upload of which less is left, or what an operator asked for. Each save is
recorded before its first byte leaves, and given up only with a reason.
"""

import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from podwatch.app.backup.connection import StoreConnection
from podwatch.app.backup.outbox import Outbox, OutgoingSave, outgoing_files, outgoing_links, used_parts
from podwatch.app.backup.run_side import RunSide
from podwatch.app.backup.stored_run import StoredRun
from podwatch.app.backup.uploads import Uploads, UploadStopped
from podwatch.checkpoints.known_checkpoints import Catalogue, SetContents
from podwatch.config.settings import Settings
from podwatch.domain.checkpoint import CheckpointSet, HeldAs, newest_complete, newest_whole
from podwatch.domain.errors import HostError, PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.starts import StartedBy, find_start
from podwatch.journal import AsyncJournal, Journal
from podwatch.store.documents import SaveIntent
from podwatch.store.inventory import REUSED_SECONDS, SaveKey
from podwatch.store.retention import RetentionRules, keeps
from podwatch.store.transfer.send import SourceChanged, SourceForeign
from podwatch.store.uploads import PINNED, PUBLICATIONS, Begun, Waiting, next_upload, why_given_up
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id

BEGUN = "sync.begun"
"""Journal key: [epoch second, step, save_id] of the newest upload's start, for ``upload_gap`` after a restart."""
CHANGED = "the checkpoint changed on disk while it was uploaded"


@dataclass(frozen=True, slots=True)
class Unstored:
    """What of this run is not in the store, in words. ``pending``: podwatch stores it; ``refused``: it cannot be
    stored, with the reason."""

    pending: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class UploadQueue:
    """Loop-side object. ``disk``: the thread that looks after links and records. ``save_gap``: seconds from one save to
    the next."""

    def __init__(
        self, settings: Settings, run: RunSide, catalogue: Catalogue, journal: AsyncJournal, clock: Clock,
        connection: StoreConnection, stored: StoredRun, outbox: Outbox, uploads: Uploads,
        save_gap: Callable[[], float | None],
    ) -> None:  # fmt: skip
        self._settings, self._run, self._catalogue, self._clock = settings, run, catalogue, clock
        self._journal, self._connection, self._stored, self._outbox = journal, connection, stored, outbox
        self._uploads, self._save_gap = uploads, save_gap
        self._rules = RetentionRules(settings.sync.keep_last, settings.sync.keep_every)
        self.disk = Worker("outbox")
        self.begun: dict[SaveKey, OutgoingSave] | None = None
        """By this pod's (step, save_id); None until the disk was read."""
        self.void: dict[SaveKey, str] = {}
        """Checkpoints that are not sent again, and why."""
        self.abandoned_in_a_row = 0
        self._waiting: dict[SaveKey, str] = {}
        """Complete checkpoints, with their lineage, that were seen since neither they nor a newer one was stored."""
        self._skipped: deque[int] = deque(maxlen=PUBLICATIONS)
        """How many of them each publication skipped."""
        self.upload_seconds: float | None = None
        self.save_seconds: float | None = None
        self._ended = False
        """The run has ended here: pinned checkpoints are uploaded, too."""
        self._gap_from: float | None = None
        self._gap_of: SaveKey | None = None

    async def load_gap(self) -> None:
        if begun := await self._journal.run(Journal.learned, BEGUN):
            self._gap_from = self._clock.monotonic() - max(0.0, self._clock.wall() - float(begun[0]))
            self._gap_of = (int(begun[1]), str(begun[2]))

    async def load(self) -> None:
        """What an earlier podwatch was sending."""
        found = await self.disk.call(self._outbox.found)
        self.begun = {save.key: save for save in found if save.run_id == self._settings.run_id}

    async def check(self) -> None:
        """Raises RootReplaced where a directory of this run is another one now."""
        await self.disk.call(self._outbox.workspace.check)

    # -- the checkpoints of this pod

    @property
    def saves(self) -> tuple[OutgoingSave, ...]:
        """Those that were begun."""
        return tuple((self.begun or {}).values())

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        """The checkpoints of this run."""
        return tuple(found for found in self._catalogue.sets if found.ours)

    async def recognise(self) -> None:
        """Those whose files are in the store are this run's, also where run.json and their records were lost."""
        for found in self._catalogue.sets:
            saved = None if found.ours or not found.complete else self._stored.find(found)
            if saved is not None and saved.manifest is not None:
                start_id = saved.manifest.start_id or saved.save_id
                await self.disk.call(self._catalogue.recognise, found, start_id, saved.manifest.lineage)

    def lacks(self, found: CheckpointSet) -> bool:
        """Whether it is not in the store."""
        return self._stored.find(found) is None

    def see(self) -> None:
        """After a rescan. An earlier podwatch has reported what is older than the newest in the store."""
        lineage, last = self._run.lineage.id, self._stored.newest_stored()
        for found in self.sets:
            key = (found.step, found.save_id)
            if found.earlier or found.held or not self._is_sendable(found):
                self._waiting.pop(key, None)
            elif found.complete and found.save_id and found.step >= last and key not in self._waiting:
                self._waiting = {
                    k: line for k, line in self._waiting.items() if k[0] != found.step
                }  # it was saved again
                self._waiting[key] = lineage

    def newer_is_complete(self, step: int) -> bool:
        lineage = self._run.lineage.id
        return any(key[0] > step and line == lineage for key, line in self._waiting.items())

    @property
    def skipped(self) -> int:
        """Checkpoints that the last publications skipped."""
        return sum(self._skipped)

    def published(self, save: OutgoingSave, seconds: float) -> None:
        """After so many seconds of upload. Older checkpoints that wait are not sent any more."""
        lineage = self._run.lineage.id
        older = sorted(k[0] for k, line in self._waiting.items() if k[0] < save.step and line == lineage)
        self._waiting = {k: line for k, line in self._waiting.items() if k[0] > save.step and line == lineage}
        for step in older:
            text = f"step {step} is not uploaded: the newer step {save.step} was uploaded first"
            self._connection.say(EventName.UPLOAD_SKIPPED, text, step=step, newer_step=save.step)
        self._skipped.append(len(older))
        self.upload_seconds, self.save_seconds = seconds, self._save_gap() or self.save_seconds

    def _is_sendable(self, found: CheckpointSet) -> bool:
        return self.lacks(found) and (found.step, found.save_id) not in self.void

    def _pinned(self) -> set[int]:
        return {*self._run.named, *self._run.pins}

    def _pinned_unstored(self) -> list[CheckpointSet]:
        """Complete pinned checkpoints, except the newest, that are not in the store, newest first."""
        sets, pins = self.sets, self._pinned()
        newest = newest_complete(sets)
        found = (s for s in sets if s.step in pins and s.complete and s is not newest)
        return sorted((s for s in found if self.lacks(s)), key=lambda s: -s.step)

    def unstored(self) -> Unstored:
        """The newest checkpoint and pinned ones, as far as they are not in the store."""
        newest, pending, refused = newest_complete(self.sets), list[str](), list[str]()
        for one in (*([newest] if newest is not None and self.lacks(newest) else []), *self._pinned_unstored()):
            why = self.void.get((one.step, one.save_id), "") or (f"held back: {one.held}" if one.held else "")
            name = f"the checkpoint of step {one.step}" if one is newest else f"{PINNED}{one.step}"
            (refused if why else pending).append(f"{name} ({why})" if why else name)
        return Unstored(tuple(pending), tuple(refused))

    def surplus(self) -> frozenset[SaveKey]:
        """Complete checkpoints, except the newest, that the store lacks and would not keep. None of them is sent unless
        an operator asks: an upload is begun only for the newest or a pinned one, and given up once a newer is stored.
        """
        inventory, sets, pins = self._stored.inventory, self.sets, self._pinned()
        if inventory is None:
            return frozenset()
        rules, lineage, newest = self._rules, self._run.lineage.id, newest_whole(sets)
        older = (s for s in sets if s.complete and not s.held and s.step not in pins and s is not newest)
        lacked = (s for s in older if not keeps(inventory, rules, s.step, lineage=lineage) and self.lacks(s))
        return frozenset((s.step, s.save_id) for s in lacked)

    # -- the end of the run

    def end(self) -> bool:
        """The run has ended here; whether that is news."""
        before, self._ended = self._ended, True
        return not before

    def is_over(self) -> bool:
        """Whether the run has ended here, and no trainer runs again."""
        self._ended = self._ended and not self._run.trainer_alive()
        return self._ended

    # -- what is next

    def pick(self, step: int | None) -> CheckpointSet:
        """The newest complete checkpoint, or the requested one. Raises HostError."""
        sets = self.sets
        chosen = newest_complete(sets) if step is None else next((s for s in sets if s.step == step), None)
        if chosen is None:
            what = "no complete checkpoint yet" if step is None else f"no checkpoint of step {step} on this pod"
            raise HostError(what, where=str(self._settings.trainer.output_dir))
        if not chosen.complete or not chosen.save_id:
            raise HostError(f"checkpoint of step {chosen.step} is not complete: {chosen.reason or chosen.completeness}")
        return chosen

    def pick_pinned(self) -> CheckpointSet | None:
        """Once the run has ended: the next pinned checkpoint that the store lacks."""
        if not self.is_over():
            return None
        return next((s for s in self._pinned_unstored() if not s.held and self._is_sendable(s)), None)

    def newer_waits(self) -> bool:
        """Whether the newest complete checkpoint waits, and may be sent now."""
        newest = newest_complete(self.sets)
        return newest is not None and self._is_sendable(newest) and self.gap_left() <= 0

    async def choose_begun(self) -> OutgoingSave | None:
        """The interrupted upload that is finished before the newest checkpoint is begun, because less is left of it.
        Those that nobody needs are given up."""
        newest, waiting = newest_complete(self.sets), list[Waiting]()
        for save in self.saves:
            if self._is_stored(save):
                await self.release(save)
            elif why := why_given_up(self._as_begun(save)):
                await self.give_up(save, why, interrupted=True)
            elif self._is_inspected(save) and not self.waits_for_end(save):
                left = await self.disk.call(self._outbox.left_bytes, save)
                waiting.append(Waiting(save.step, save.save_id, left))
        fresh = None
        if newest is not None and self.newer_waits():
            fresh = Waiting(newest.step, newest.save_id, newest.size_bytes)
        best = next_upload(fresh, [one for one in waiting if fresh is None or one.step != fresh.step])
        return None if best is None else (self.begun or {}).get((best.step, best.save_id))

    def _is_inspected(self, save: OutgoingSave) -> bool:
        """Whether exactly these files were found complete in this boot."""
        found = next((s for s in self.sets if s.step == save.step), None)
        if found is not None and found.save_id == save.save_id:
            return found.complete and not found.held
        return save.linked and save.boot_id == boot_id()

    def _is_stored(self, save: OutgoingSave) -> bool:
        inventory = self._stored.inventory
        return inventory is not None and save.stored_key in inventory.stored

    def waits_for_end(self, save: OutgoingSave) -> bool:
        """A pinned one that is not the newest: the next checkpoint would wait for it."""
        return save.step in self._pinned() and save.step < self._stored.newest_stored() and not self.is_over()

    def _as_begun(self, save: OutgoingSave) -> Begun:
        found = next((s for s in self.sets if s.step == save.step), None)
        return Begun(
            save.step, save.save_id, found, linked=save.linked, void=save.key in self.void,
            same_lineage=save.lineage == self._run.lineage.id, newest_stored=self._stored.newest_stored(),
            pinned=save.step in self._pinned(), scanned=bool(self._catalogue.sets),
        )  # fmt: skip

    # -- the gap between uploads

    def gap_left(self) -> float:
        """Seconds until the next upload may start; 0 where nothing would start anyway, or one continues."""
        newest = newest_complete(self.sets)
        if self._gap_from is None or newest is None or self.is_over():
            return 0.0
        if (newest.step, newest.save_id) == self._gap_of or not self.lacks(newest):
            return 0.0
        return self._gap_from + self._settings.sync.upload_gap - self._clock.monotonic()

    def begin_gap(self, key: SaveKey) -> None:
        if self._gap_of != key:
            self._gap_from, self._gap_of = self._clock.monotonic(), key
            self._journal.post(Journal.learn, BEGUN, [self._clock.wall(), *key])

    # -- what begins an upload

    async def take(self, chosen: CheckpointSet) -> OutgoingSave:
        """Record it, and link its files, unless it was begun before. Raises SourceChanged when it is no longer the one
        that was found complete."""
        if (begun := (self.begun or {}).get((chosen.step, chosen.save_id))) is not None:
            return begun
        contents = await self._contents(chosen)
        save = self._outgoing(chosen, contents)
        known = self._stored.inventory
        assert known is not None
        same = known.find_unfinished(chosen.step, save.files, self._run.record.writer_id)
        if same is not None and same.intent is not None and same.intent.piece_size == save.piece_size:
            save = replace(save, stored_as=same.save_id)
        return self._note(await self.disk.call(self._outbox.take, save, contents))

    def _note(self, save: OutgoingSave) -> OutgoingSave:
        assert self.begun is not None
        self.begun[save.key] = save
        return save

    async def _contents(self, chosen: CheckpointSet) -> SetContents:
        try:
            contents = await self.disk.call(self._catalogue.contents, chosen.step)
        except (OSError, PodwatchError) as error:
            raise SourceChanged(f"the checkpoint is gone: {error}", where=f"step {chosen.step}") from error
        if not contents.set.complete or contents.set.save_id != chosen.save_id:
            what = "the step was saved again, so this checkpoint is gone"
            raise SourceChanged(what, where=f"step {chosen.step}")
        if contents.set.held:
            raise SourceChanged(f"the checkpoint is held back: {contents.set.held}", where=f"step {chosen.step}")
        return contents

    def _outgoing(self, chosen: CheckpointSet, contents: SetContents) -> OutgoingSave:
        run, files = self._run.record, outgoing_files(contents.files)
        start = find_start(chosen.start_id, run.starts)
        known = start if start is not None and start.by not in (StartedBy.GUARD, StartedBy.CLEAN) else None
        paths = {p.part.name: str(p.part.path) for p in contents.parts}
        return OutgoingSave(
            self._settings.run_id, chosen.step, chosen.save_id, secrets.token_hex(8), chosen.layout,
            int(self._settings.sync.part_size), files, {part: paths[part] for part in used_parts(files)},
            outgoing_links(contents), run.lineage.id, "" if known is None else known.id,
            None if known is None or not known.proved else known.from_step, contents.world_size,
            self._clock.wall(), boot_id(),
        )  # fmt: skip

    async def intend(self, save: OutgoingSave, generation: int) -> tuple[SaveIntent, OutgoingSave]:
        """The intent in the store, which is written first where there is none. An old one can be about to be swept:
        then the save is sent under a new name."""
        inventory = self._stored.inventory
        assert inventory is not None
        found = next((u for u in inventory.unfinished if u.key == save.stored_key), None)
        young = found is not None and inventory.store_wall - found.newest_wall < REUSED_SECONDS
        if young and found is not None and found.intent is not None and found.intent.piece_size == save.piece_size:
            return found.intent, save
        sent = await self.disk.call(self._outbox.sent, save)
        if found is not None or sent:
            save = replace(save, stored_as=secrets.token_hex(8))
            await self.disk.call(self._outbox.rename, save)
            self._note(save)
        try:
            intent = save.intent(self._run.record.writer_id, max(1, generation), self._clock.wall())
        except (ValueError, PodwatchError) as error:
            raise SourceChanged(f"its files cannot be stored: {error}", where=f"step {save.step}") from error
        text = f"step {save.step}: upload started"
        self._connection.say(EventName.UPLOAD_STARTED, text, step=save.step, bytes=save.total_bytes)
        await self._stored.begin(intent)
        return intent, save

    # -- what ends it

    async def is_unchanged(self, save: OutgoingSave) -> bool:
        """Whether every file is as it was when it was found complete. Raises RootReplaced."""
        await self.check()
        return await self.disk.call(self._outbox.is_unchanged, save)

    def why_mixed(self, save: OutgoingSave) -> str:
        """Why it is held back since it was begun, where a second trainer may have written it: only an operator releases
        it, by a request that sends it again. Empty if it is not."""
        two = [s for s in self._catalogue.sets if s.held_as is HeldAs.TWO_WRITERS]
        return next((s.held for s in two if (s.step, s.save_id) == (save.step, save.save_id)), "")

    async def send_again(self, save: OutgoingSave, names: Collection[str]) -> None:
        """These objects of it count as sent no more."""
        await self.disk.call(self._outbox.send_again, save, names)

    async def release(self, save: OutgoingSave) -> None:
        if self.begun is not None:
            self.begun.pop(save.key, None)
        await self.disk.call(self._outbox.release, save)

    async def release_step(self, step: int) -> None:
        """The disk is about to fill up, and this checkpoint must be removed."""
        for save in self.saves:
            if save.step == step:
                self.void[save.key] = CHANGED
                if self._is_in_flight(save):
                    self._uploads.stop("the disk needs the space of this checkpoint")
                    await self._uploads.ended()
                await self.release(save)

    async def release_cramped(self) -> None:
        """Give up a checkpoint that only our links keep, as soon as the next save needs its space."""
        for save in self.saves:
            if save.linked and await self.disk.call(self._outbox.is_cramped, save):
                await self.give_up(save, "the trainer removed it and the next save needs its space")

    def _is_in_flight(self, save: OutgoingSave) -> bool:
        flight = self._uploads.in_flight
        return flight is not None and flight.step == save.step

    async def give_up(self, save: OutgoingSave, why: str, *, interrupted: bool = False) -> None:
        self.void[save.key] = why
        if self._is_in_flight(save):
            self._uploads.stop(why)
            return  # whoever sends it abandons it
        await self._forget(
            save.key, f"{'interrupted upload not continued' if interrupted else 'upload abandoned'}: {why}"
        )

    async def abandon(self, key: SaveKey, error: PodwatchError) -> None:
        """Its upload failed for good."""
        foreign = isinstance(error, SourceForeign)
        self.void.setdefault(key, error.what if foreign else CHANGED)
        in_a_row = self.abandoned_in_a_row = self.abandoned_in_a_row + isinstance(error, SourceChanged)
        if foreign:
            severity, hint = Severity.CRITICAL, ". Find out which user made it, remove it, and save again"
        elif in_a_row >= 2:
            severity = Severity.CRITICAL
            hint = ". The trainer removes checkpoints faster than they can be uploaded: let it keep more of them"
        else:
            newer = any(s.complete and s.step > key[0] for s in self.sets)
            severity, hint = (Severity.INFO if newer or isinstance(error, UploadStopped) else Severity.WARNING), ""
        await self._forget(key, f"upload abandoned: {error.what}{hint}", severity, in_a_row=in_a_row)

    async def _forget(self, key: SaveKey, what: str, severity: Severity = Severity.INFO, **fields: int) -> None:
        self._waiting.pop(key, None)
        if (save := (self.begun or {}).get(key)) is not None:
            await self.release(save)
        self._connection.say(EventName.UPLOAD_ABANDONED, f"step {key[0]}: {what}", severity, step=key[0], **fields)
