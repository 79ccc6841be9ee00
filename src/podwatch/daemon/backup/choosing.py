"""Which checkpoint is sent next: the newest complete one, an interrupted upload of which less is left, or what an
operator asked for."""

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.config.settings import Settings
from podwatch.daemon.backup.outgoing import OutgoingSave
from podwatch.daemon.backup.run_side import RunSide
from podwatch.daemon.backup.sending import Sending
from podwatch.daemon.backup.stock import Stock, newest_of_lineage
from podwatch.domain.checkpoint import CheckpointSet, newest_complete, newest_whole
from podwatch.domain.errors import HostError
from podwatch.journal import AsyncJournal, Journal
from podwatch.policy.uploads import Begun, Waiting, next_upload, why_given_up
from podwatch.store.inventory import SaveKey
from podwatch.store.retention import RetentionRules, keeps
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id

BEGUN = "sync.begun"
"""Journal key: [epoch second, step, save_id] of the newest upload's start, for ``upload_gap`` after a restart."""


class Choosing:
    """Loop-side object."""

    def __init__(
        self, settings: Settings, run: RunSide, catalogue: Catalogue, journal: AsyncJournal, clock: Clock, stock: Stock,
        sending: Sending,
    ) -> None:  # fmt: skip
        self._settings, self._run, self._catalogue, self._journal, self._clock = (
            settings,
            run,
            catalogue,
            journal,
            clock,
        )
        self._stock, self._sending = stock, sending
        self._rules = RetentionRules(settings.sync.keep_last, settings.sync.keep_every)
        self._ended = False
        """The run has ended here: pinned checkpoints are uploaded, too."""
        self._gap_from: float | None = None
        self._gap_of: SaveKey | None = None

    async def load(self) -> None:
        if begun := await self._journal.run(Journal.learned, BEGUN):
            self._gap_from = self._clock.monotonic() - max(0.0, self._clock.wall() - float(begun[0]))
            self._gap_of = (int(begun[1]), str(begun[2]))

    # -- the checkpoints of this pod

    @property
    def sets(self) -> tuple[CheckpointSet, ...]:
        """Those of this run."""
        return tuple(found for found in self._catalogue.sets if found.ours)

    async def recognise(self) -> None:
        """Those whose files are in the store are this run's, also where run.json and their records were lost."""
        for found in self._catalogue.sets:
            saved = None if found.ours or not found.complete else self._stock.find(found)
            if saved is not None and saved.manifest is not None:
                start_id = saved.manifest.start_id or saved.save_id
                branch = saved.manifest.lineage
                await self._sending.disk.call(self._catalogue.recognise, found, start_id, branch)

    def lacks(self, found: CheckpointSet) -> bool:
        """Whether it is not in the store."""
        return self._stock.find(found) is None

    def is_sendable(self, found: CheckpointSet) -> bool:
        return self.lacks(found) and (found.step, found.save_id) not in self._sending.void

    def _pinned(self) -> set[int]:
        return {*self._run.named, *self._run.pins}

    def pinned_unstored(self) -> list[CheckpointSet]:
        """Complete pinned checkpoints, except the newest, that are not in the store, newest first."""
        sets, pins = self.sets, self._pinned()
        newest = newest_complete(sets)
        found = (s for s in sets if s.step in pins and s.complete and s is not newest)
        return sorted((s for s in found if self.lacks(s)), key=lambda s: -s.step)

    def surplus(self) -> frozenset[SaveKey]:
        """Complete checkpoints, except the newest, that the store lacks and would not keep. None of them is sent unless
        an operator asks: an upload is begun only for the newest or a pinned one, and given up once a newer is stored.
        """
        inventory, sets, pins = self._stock.inventory, self.sets, self._pinned()
        if inventory is None:
            return frozenset()
        rules, lineage, newest = self._rules, self._run.lineage.id, newest_whole(sets)
        older = (s for s in sets if s.complete and not s.held and s.step not in pins and s is not newest)
        lacked = (s for s in older if not keeps(inventory, rules, s.step, lineage=lineage) and self.lacks(s))
        return frozenset((s.step, s.save_id) for s in lacked)

    def newest_stored(self) -> int:
        """The highest step of this lineage in the store; -1 if there is none."""
        inventory = self._stock.inventory
        return -1 if inventory is None else newest_of_lineage(inventory, self._run.lineage.id)

    # -- the end of the run

    def end(self) -> bool:
        """The run has ended here; whether that is news."""
        before, self._ended = self._ended, True
        return not before

    def is_over(self) -> bool:
        """Whether the run has ended here, and no trainer runs again."""
        self._ended = self._ended and not self._run.trainer_alive()
        return self._ended

    # -- choosing

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
        return next((s for s in self.pinned_unstored() if not s.held and self.is_sendable(s)), None)

    def newer_waits(self) -> bool:
        """Whether the newest complete checkpoint waits, and may be sent now."""
        newest = newest_complete(self.sets)
        return newest is not None and self.is_sendable(newest) and self.gap_left() <= 0

    async def choose_begun(self) -> OutgoingSave | None:
        """The interrupted upload that is finished before the newest checkpoint is begun, because less is left of it.
        Those that nobody needs are given up."""
        newest, waiting, sending = newest_complete(self.sets), list[Waiting](), self._sending
        for save in sending.saves:
            if self._is_stored(save):
                await sending.release(save)
            elif why := why_given_up(self._as_begun(save)):
                await sending.give_up(save, why, interrupted=True)
            elif self._is_inspected(save) and not self.waits_for_end(save):
                left = await sending.disk.call(sending.uploads.left_bytes, save)
                waiting.append(Waiting(save.step, save.save_id, left))
        fresh = None
        if newest is not None and self.newer_waits():
            fresh = Waiting(newest.step, newest.save_id, newest.size_bytes)
        best = next_upload(fresh, [one for one in waiting if fresh is None or one.step != fresh.step])
        return None if best is None else next((s for s in sending.saves if s.key == (best.step, best.save_id)), None)

    def _is_inspected(self, save: OutgoingSave) -> bool:
        """Whether exactly these files were found complete in this boot."""
        found = next((s for s in self.sets if s.step == save.step), None)
        if found is not None and found.save_id == save.save_id:
            return found.complete and not found.held
        return save.linked and save.boot_id == boot_id()

    def _is_stored(self, save: OutgoingSave) -> bool:
        inventory = self._stock.inventory
        return inventory is not None and save.stored_key in inventory.stored

    def waits_for_end(self, save: OutgoingSave) -> bool:
        """A pinned one that is not the newest: the next checkpoint would wait for it."""
        return save.step in self._pinned() and save.step < self.newest_stored() and not self.is_over()

    def _as_begun(self, save: OutgoingSave) -> Begun:
        found = next((s for s in self.sets if s.step == save.step), None)
        return Begun(
            save.step, save.save_id, found, linked=save.linked, void=save.key in self._sending.void,
            same_lineage=save.lineage == self._run.lineage.id, newest_stored=self.newest_stored(),
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
