"""What this pod is sending: each save is recorded before its first byte leaves, and given up only with a reason."""

import secrets
from dataclasses import replace

from podwatch.checkpoints.known_checkpoints import Catalogue, SetContents
from podwatch.config.settings import Settings
from podwatch.daemon.backup.connection import StoreConnection
from podwatch.daemon.backup.outbox import Outbox
from podwatch.daemon.backup.outgoing import OutgoingSave, outgoing_files, outgoing_links, used_parts
from podwatch.daemon.backup.publication import Publication
from podwatch.daemon.backup.run_side import RunSide
from podwatch.daemon.backup.stock import Stock
from podwatch.daemon.backup.tally import CheckpointTally
from podwatch.daemon.backup.uploads import Uploads, UploadStopped
from podwatch.domain.checkpoint import CheckpointSet
from podwatch.domain.errors import PodwatchError
from podwatch.domain.event import EventName
from podwatch.domain.finding import Severity
from podwatch.domain.starts import StartedBy, find_start
from podwatch.store.documents import SaveIntent
from podwatch.store.inventory import REUSED_SECONDS, SaveKey
from podwatch.store.transfer.send import SourceChanged, SourceForeign
from podwatch.system.blocking_calls import Worker
from podwatch.system.clock import Clock
from podwatch.system.procfs import boot_id

CHANGED = "the checkpoint changed on disk while it was uploaded"


class Sending:
    """Loop-side object. ``disk``: the thread that looks after links and records."""

    def __init__(
        self, settings: Settings, run: RunSide, catalogue: Catalogue, clock: Clock, connection: StoreConnection,
        stock: Stock, outbox: Outbox, uploads: Uploads, tally: CheckpointTally, publication: Publication,
    ) -> None:  # fmt: skip
        self._settings, self._run, self._catalogue, self._clock = settings, run, catalogue, clock
        self._connection, self._stock, self._outbox = connection, stock, outbox
        self.uploads, self._tally, self._publication = uploads, tally, publication
        self.disk = Worker("outbox")
        self.begun: dict[SaveKey, OutgoingSave] | None = None
        """By this pod's (step, save_id); None until the disk was read."""
        self.void: dict[SaveKey, str] = {}
        """Checkpoints that are not sent again, and why."""
        self.abandoned_in_a_row = 0

    @property
    def saves(self) -> tuple[OutgoingSave, ...]:
        return tuple((self.begun or {}).values())

    def of(self, found: CheckpointSet) -> OutgoingSave | None:
        return (self.begun or {}).get((found.step, found.save_id))

    async def load(self) -> None:
        """What an earlier podwatch was sending."""
        found = await self.disk.call(self._outbox.found)
        self.begun = {save.key: save for save in found if save.run_id == self._settings.run_id}

    async def check(self) -> None:
        """Raises RootReplaced where a directory of this run is another one now."""
        await self.disk.call(self._outbox.workspace.check)

    # -- what begins it

    async def take(self, chosen: CheckpointSet) -> OutgoingSave:
        """Record it, and link its files. Raises SourceChanged when it is no longer the one that was found complete."""
        contents = await self._contents(chosen)
        save = self._outgoing(chosen, contents)
        known = self._stock.inventory
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
        inventory = self._stock.inventory
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
        await self._publication.begin(intent)
        self._stock.begin(intent)
        return intent, save

    # -- what ends it

    async def is_unchanged(self, save: OutgoingSave) -> bool:
        """Whether every file is as it was when it was found complete. Raises RootReplaced."""
        await self.check()
        return await self.disk.call(self._outbox.is_unchanged, save)

    async def send_again(self, save: OutgoingSave, names: tuple[str, ...]) -> None:
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
                    self.uploads.stop("the disk needs the space of this checkpoint")
                    await self.uploads.ended()
                await self.release(save)

    async def release_cramped(self) -> None:
        """Give up a checkpoint that only our links keep, as soon as the next save needs its space."""
        for save in self.saves:
            if save.linked and await self.disk.call(self._outbox.is_cramped, save):
                await self.give_up(save, "the trainer removed it and the next save needs its space")

    def _is_in_flight(self, save: OutgoingSave) -> bool:
        flight = self.uploads.in_flight
        return flight is not None and flight.step == save.step

    async def give_up(self, save: OutgoingSave, why: str, *, interrupted: bool = False) -> None:
        self.void[save.key] = why
        if self._is_in_flight(save):
            self.uploads.stop(why)
            return  # whoever sends it abandons it
        self._tally.abandoned(save.key)
        await self.release(save)
        text = f"step {save.step}: {'interrupted upload not continued' if interrupted else 'upload abandoned'}: {why}"
        self._connection.say(EventName.UPLOAD_ABANDONED, text, step=save.step)

    async def abandon(self, key: SaveKey, save: OutgoingSave | None, error: PodwatchError, *, newer: bool) -> None:
        """Its upload failed for good. ``newer``: a newer complete checkpoint is on this pod."""
        foreign = isinstance(error, SourceForeign)
        self.void[key] = error.what if foreign else CHANGED
        self._tally.abandoned(key)
        if save is not None:
            await self.release(save)
        in_a_row = self.abandoned_in_a_row = self.abandoned_in_a_row + isinstance(error, SourceChanged)
        if foreign:
            severity, hint = Severity.CRITICAL, ". Find out which user made it, remove it, and save again"
        elif in_a_row >= 2:
            severity = Severity.CRITICAL
            hint = ". The trainer removes checkpoints faster than they can be uploaded: let it keep more of them"
        else:
            severity, hint = (Severity.INFO if newer or isinstance(error, UploadStopped) else Severity.WARNING), ""
        text = f"step {key[0]}: upload abandoned: {error.what}{hint}"
        self._connection.say(EventName.UPLOAD_ABANDONED, text, severity, step=key[0], in_a_row=in_a_row)
