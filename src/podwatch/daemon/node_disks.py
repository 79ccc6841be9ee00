"""Nodes of one run that each have a disk of their own, with their part of each checkpoint (docs/nodes.md).

Each node above 0 lists its disk, uploads its files when node 0 asks for it, and deletes what node 0 has deleted
(``OwnDisk``). Node 0 judges, uploads and publishes the checkpoints of all (``OtherDisks``). They exchange documents in
the directory that all nodes share (domain/node_files.py); a document of another attempt names another process, and
counts for nothing.
"""

import asyncio
import contextlib
import hashlib
import math
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from podwatch.checkpoints.known_checkpoints import Catalogue, SetContents
from podwatch.checkpoints.layouts.base import PartFiles
from podwatch.checkpoints.other_nodes import NodeLister
from podwatch.checkpoints.scan import is_temporary, scan_part
from podwatch.config.settings import Settings
from podwatch.daemon.components import Deletion, Run
from podwatch.daemon.nodes import LIST, ORDERS, SENT, Gang
from podwatch.domain.checkpoint import CheckpointSet, Completeness, FileEntry
from podwatch.domain.errors import ConfigurationError, HostError, PodwatchError, RemoteError
from podwatch.domain.node_files import (
    NodeList,
    NodeOrders,
    NodeStep,
    SentFile,
    SentFiles,
    StepDigests,
    UploadOrder,
    digest_of,
    list_document,
    orders_document,
    parse_list,
    parse_orders,
    parse_sent,
    sent_document,
)
from podwatch.journal import Journal
from podwatch.journal.upload_records import UploadedObject
from podwatch.policy.local_retention import Removal, RemovalKind, RemovalPlan, Trigger
from podwatch.policy.nodes import to_cancel, to_delete
from podwatch.stores.base import Upload
from podwatch.stores.credentials import Credentials, credentials_for
from podwatch.stores.open_store import open_store
from podwatch.sync.interfaces import RunIdentity, SyncStatus, features_of
from podwatch.sync.upload import child_job as jobs
from podwatch.system.blocking_calls import Worker

if TYPE_CHECKING:
    from podwatch.sync.syncer import Syncer

LOOK_SECONDS: Final = 1.0
"""Between two looks at the documents: as often as the nodes report."""
ANSWER_SECONDS: Final = 120.0
"""A node begins an upload within two looks."""
DELETE_AGAIN_SECONDS: Final = 600.0
"""Between two attempts to delete the same files."""
FILES_SECONDS: Final = 30.0
"""A disk or directory that takes longer for a look has not answered."""
MARK_SECONDS: Final = 10.0
"""Between two requests of node 0 for a new look, also if nothing has changed on its own disk."""
STALE_SECONDS: Final = 60.0
"""What a node's disk showed longer ago is not known any more: longer than a look that is still answered, shorter than
``[nodes] silence``."""
ABANDONED_KEPT: Final = 100
"""Abandoned uploads that the orders list: a node reads each within seconds."""


class OtherDisks:
    """Node 0: what is on the other nodes' disks, and their uploads. Implements ``checkpoints.other_nodes.OtherNodes``
    and ``sync.interfaces.NodeUploads``."""

    def __init__(
        self, run: Run, gang: Gang, catalogue: Catalogue, syncer: "Syncer | None", changed: Callable[[], None]
    ) -> None:
        """``changed`` is called on the loop when a list has changed."""
        self._run, self._gang, self._catalogue, self._syncer = run, gang, catalogue, syncer
        self._changed = changed
        self._worker = Worker("node disks")
        self._lists: Mapping[int, NodeList] = {}
        self._read: dict[int, str] = {}
        """The listing of each node that was read last."""
        self._looked: Mapping[int, int] = {}
        """Rank -> the mark of its list."""
        self._mark_times: dict[int, float] = {}
        """Mark -> when it was written (monotonic): a look that carries it began later."""
        self._looked_at: Mapping[int, float] = {}
        """Rank -> a time (monotonic) after which its newest look began."""
        self._marked = False
        """Someone waits for looks that begin from now on."""
        self._orders = NodeOrders(gang.process, mark=int(run.clock.wall() * 1000))  # above those of a podwatch before
        self._written: NodeOrders | None = None
        self._number = 0
        """Of the newest order to upload."""
        self._answers: dict[int, SentFiles] = {}
        self._seen: set[int] = set()
        """Steps that were on this node's disk since it looks."""
        self._asked: dict[int, int] = {}
        """Rank -> bytes that the newest order asks of it."""

    # -- for the catalogue, in any thread -----------------------------------------------------------------------------

    def unknown(self) -> str:
        if not self._gang.members:
            return "the other nodes of this run have not reported yet"
        for rank in range(1, self._gang.place.count):
            found = self._lists.get(rank)
            if found is None:
                return f"node {rank} has not listed its checkpoints yet"
            if found.problem:
                return f"node {rank} cannot list its checkpoints: {found.problem}"
            if (at := self._looked_at.get(rank)) is None:
                return f"node {rank} has not looked at its disk yet"
            if self._run.clock.monotonic() - at > STALE_SECONDS:
                return f"node {rank} has not looked at its disk for more than {STALE_SECONDS:.0f} s"
        return ""

    def steps(self, step: int) -> Sequence[NodeStep]:
        lists = self._lists
        return [lists[rank].of(step) for rank in sorted(lists)]

    def mark(self) -> int:
        self._marked = True
        return self._orders.mark

    def looked(self) -> int:
        return min((self._looked.get(rank, 0) for rank in range(1, self._gang.place.count)), default=0)

    # -- for the syncer, on the loop ----------------------------------------------------------------------------------

    def order(self, contents: SetContents, lacking: Sequence[str], refused: Collection[str]) -> None:
        asked, lacks = contents.set, set(lacking)
        wanted = [f for f in contents.files if f.node is not None and f"{f.part}/{f.path}" in lacks]
        ranks = sorted({f.node for f in wanted if f.node is not None})
        digests = {rank: self._lists[rank].of(asked.step).digest for rank in ranks}
        paths = {rank: tuple(sorted(f"{f.part}/{f.path}" for f in wanted if f.node == rank)) for rank in ranks}
        self._asked = {rank: sum(f.size for f in wanted if f.node == rank) for rank in ranks}
        number = int(self._run.clock.wall() * 1000)  # also of a restarted podwatch: an old answer is none to this order
        number = self._number = max(number, self._number + 1)
        again = tuple(sorted(refused))
        upload = UploadOrder(number, asked.step, asked.save_id, self._writer_id(), digests, paths, again)
        self._answers = {}
        abandoned = tuple(one for one in self._orders.abandoned if one != (asked.step, asked.save_id))
        self._orders = replace(self._orders, upload=upload, abandoned=abandoned)

    def abandon(self, step: int, save_id: str) -> None:
        order = self._orders.upload
        ours = order is not None and (order.step, order.save_id) == (step, save_id)
        others = tuple(one for one in self._orders.abandoned if one != (step, save_id))
        abandoned = (*others, (step, save_id))[-ABANDONED_KEPT:]
        self._orders = replace(self._orders, upload=None if ours else order, abandoned=abandoned)

    def _writer_id(self) -> str:
        return "" if self._syncer is None else self._syncer.writer_id

    async def sent(self, progress: Callable[[int], None]) -> Sequence[SentFile]:
        from podwatch.sync.upload.start_child import SetVoid

        order = self._orders.upload
        if order is None:
            raise HostError("no upload was ordered from the other nodes")
        began = self._run.clock.monotonic()
        while True:
            known = {rank: a for rank, a in self._answers.items() if a.number == order.number}
            answers = list(known.values())
            if len(answers) < len(order.digests) and self._run.clock.monotonic() - began > ANSWER_SECONDS:
                fix = "podwatch asks again; if this lasts, check the disks of the nodes"
                raise RemoteError("a node does not answer when it is asked to upload", where="[nodes]", fix=fix)
            if changed := self._changed_on(order, {rank for rank, answer in known.items() if answer.done}):
                raise SetVoid(f"its files on node {changed} changed", where=f"step {order.step}")
            for answer in answers:
                if answer.changed:
                    raise SetVoid(f"another node: {answer.failed}", where=f"step {order.step}")
                if answer.failed:
                    fix = "nothing: podwatch tries again"
                    raise RemoteError(f"a node cannot upload its part: {answer.failed}", where="[nodes]", fix=fix)
            progress(sum(min(a.sent, self._asked.get(rank, 0)) for rank, a in known.items()))
            if len(answers) == len(order.digests) and all(a.done for a in answers):
                return [file for answer in answers for file in answer.files]
            await self._run.clock.sleep(LOOK_SECONDS / 2)

    def _changed_on(self, order: UploadOrder, done: Collection[int]) -> int | None:
        """The first node whose files are not those of the order any more, of those that have not sent all."""
        lists = self._lists
        asked = ((rank, digest) for rank, digest in order.digests.items() if rank in lists and rank not in done)
        return next((rank for rank, digest in asked if lists[rank].of(order.step).digest != digest), None)

    # -- turns --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until podwatch ends."""
        while True:
            with contextlib.suppress(OSError, PodwatchError):  # Gang reports the directory
                await self._turn()
            await self._run.clock.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        self._worker.close()

    async def _turn(self) -> None:
        members, run_id = self._gang.members, self._run.config.settings.run_id
        if not members:
            return
        lists, looked = dict(self._lists), dict(self._looked)
        for rank in range(1, len(members)):
            report = self._gang.report_of(rank)
            if report is None or not report.listing:
                continue
            if report.listing != self._read.get(rank):
                found, listing = await self._worker.call(self._get_list, members[rank], timeout=FILES_SECONDS)
                if found is not None and (found.rank, found.process) == (rank, members[rank]):
                    lists[rank] = found
                    self._read[rank] = listing
            if report.listing == self._read.get(rank):
                looked[rank] = report.looked
        changed, self._lists = lists != self._lists, lists
        self._looked = looked  # after the lists: the catalogue asks in another thread
        self._looked_at = {rank: self._mark_times[mark] for rank, mark in looked.items() if mark in self._mark_times}
        if changed:
            self._changed()  # a checkpoint can have become complete
        await self._write_orders()
        if (order := self._orders.upload) is not None:
            for rank in order.digests:
                data = await self._worker.call(self._gang.files.get, SENT, members[rank], timeout=FILES_SECONDS)
                answer = parse_sent(data, run_id)
                if answer is not None and answer.process == members[rank]:
                    self._answers[rank] = answer

    async def _write_orders(self) -> None:
        now = self._run.clock.monotonic()
        due = now - max(self._mark_times.values(), default=-math.inf) >= MARK_SECONDS
        marked, self._marked = self._marked or due, False
        status = SyncStatus() if self._syncer is None else self._syncer.status()
        sets = self._catalogue.sets
        complete, gone = self._about_steps(sets, status)
        stored = tuple(s.step for s in sets if s.step in complete and (s.step, s.save_id) in status.stored)
        orders = self._orders = replace(
            self._orders,
            mark=self._orders.mark + marked,
            complete=complete,
            gone=gone,
            stored=stored,
            newest=self._newest(status),
        )
        if orders != self._written:
            data = orders_document(orders, self._run.config.settings.run_id)
            await self._worker.call(self._gang.files.put, ORDERS, self._gang.process, data, timeout=FILES_SECONDS)
            self._written = orders
            oldest = min(self._looked.values(), default=0)
            times = {mark: at for mark, at in self._mark_times.items() if mark >= oldest}
            self._mark_times = {orders.mark: now, **times}

    def _newest(self, status: SyncStatus) -> int:
        return -1 if self._syncer is None else status.newest_of.get(self._syncer.lineage, -1)

    def _get_list(self, process: str) -> tuple[NodeList | None, str]:
        """The list of a node, and what identifies it. Blocks."""
        data = self._gang.files.get(LIST, process)
        return parse_list(data, self._run.config.settings.run_id), hashlib.sha256(data).hexdigest()[:32]

    def _about_steps(self, sets: Sequence[CheckpointSet], status: SyncStatus) -> tuple[StepDigests, StepDigests]:
        """The checkpoints that are complete, and those that the others shall delete."""
        if self._catalogue.problem or self._syncer is None:
            return self._orders.complete, self._orders.gone
        present = {found.step for found in sets}
        self._seen |= present
        complete = {
            found.step: dict(enumerate(found.elsewhere, 1))  # as judged: the lists can be newer
            for found in sets
            if found.complete
        }
        stored = {step for step, _ in status.stored}
        if self._run.handle is None or self._run.acting:  # a start can need any of them
            return complete, {}
        return complete, to_delete(self._lists.values(), present, self._seen, stored, self._newest(status))


class OwnDisk:
    """A node above 0: lists this node's disk, uploads and deletes as node 0 asks. One per daemon."""

    def __init__(
        self, settings: Settings, run: Run, gang: Gang, deletion: Deletion, changed: Callable[[], None]
    ) -> None:
        """``changed`` is called on the loop when node 0 has judged something."""
        self._settings, self._run, self._gang, self._deletion = settings, run, gang, deletion
        self._changed = changed
        self._orders = NodeOrders("")
        """The newest that node 0 has written, of this attempt or an earlier one."""
        times = settings.checkpoints
        self._lister = NodeLister(run.layout, run.workspace.roots, run.clock, times.settle, times.settle_weak)
        self._worker, self._sending, self._directory = Worker("own disk"), Worker("own uploads"), Worker("reports")
        self._steps: tuple[NodeStep, ...] = ()
        self._upload: asyncio.Task[None] | None = None
        self._answer = SentFiles(gang.process, 0)
        self._answered: SentFiles | None = None
        self._order: UploadOrder | None = None
        self._deleting: asyncio.Task[None] | None = None
        self._cancelling: asyncio.Task[None] | None = None
        self._considered: object = None
        """The orders by which unfinished uploads were cancelled last."""
        self._tried: dict[tuple[int, str], float] = {}
        """(step, digest) of deletions, and when."""
        self._listed: tuple[tuple[NodeStep, ...], str] | None = None
        self._sender = NodeSender(settings, run, self._sending)

    def found_complete(self, step: int, found: Sequence[PartFiles]) -> bool:
        """As ``checkpoints.completeness_check.FoundComplete``. In any thread."""
        files = [f for p in found if p.part.required or p.part.uploaded for f in p.files if not is_temporary(f.path)]
        return self._is_complete(step, digest_of(files))

    def _is_complete(self, step: int, digest: str) -> bool:
        return self._orders.complete.get(step, {}).get(self._gang.place.rank) == digest

    async def run(self) -> None:
        """Until podwatch ends."""
        while True:
            with contextlib.suppress(OSError, PodwatchError):
                await self._turn()
            await self._run.clock.sleep(LOOK_SECONDS)

    # -- for the pruner: what node 0 knows of the store ---------------------------------------------------------------

    @property
    def uploading(self) -> frozenset[int]:
        """The step that is being uploaded, or is not published yet."""
        order = self._order
        if order is None or self._answer.failed or order.step in self.stored:
            return frozenset()
        return frozenset({order.step})

    @property
    def stored(self) -> frozenset[int]:
        """Steps whose part on this disk is of a checkpoint that is whole in the store."""
        stored = set(self._orders.stored)
        return frozenset(s.step for s in self._steps if s.step in stored and self._is_complete(s.step, s.digest))

    @property
    def newest_stored(self) -> int:
        """The newest step of this lineage in the store; -1 where none is known."""
        return self._orders.newest

    async def abandon(self, step: int) -> None:
        """Stop the upload of ``step``, which must be removed: node 0 gives it up."""
        if self._order is not None and self._order.step == step and self._upload is not None:
            await _ended(self._upload)
            why = "its disk needs the space for the next save"
            self._answer = replace(self._answer, done=False, failed=why, changed=True)

    async def close(self) -> None:
        for task in (self._upload, self._deleting, self._cancelling):
            if task is not None:
                await _ended(task)
        await self._sender.close()
        for worker in (self._worker, self._sending, self._directory):
            worker.close()

    async def _turn(self) -> None:
        await self._list()
        if not (leader := self._gang.leader):
            return
        data = await self._directory.call(self._gang.files.get, ORDERS, leader, timeout=FILES_SECONDS)
        orders = parse_orders(data, self._settings.run_id)
        if orders is None or orders.process != leader:
            return
        changed, self._orders = orders.complete != self._orders.complete, orders
        if changed:
            self._changed()
        if self._deleting is None or self._deleting.done():
            self._deleting = asyncio.create_task(self._delete(orders), name="own deletions")
        await self._obey(orders.upload)
        if self._cancelling is None or self._cancelling.done():
            self._cancelling = asyncio.create_task(self._cancel(orders), name="own abandoned uploads")
        if self._answer != self._answered:
            answer = self._answer
            document = sent_document(answer, self._settings.run_id)
            await self._directory.call(self._gang.files.put, SENT, self._gang.process, document, timeout=FILES_SECONDS)
            self._answered = answer

    async def _list(self) -> None:
        """Publish this node's list where it has changed."""
        rank, process, problem, mark = self._gang.place.rank, self._gang.process, "", self._orders.mark
        try:
            self._steps = await self._worker.call(self._lister.look, timeout=FILES_SECONDS)
        except OSError as error:  # a timeout of a hung disk too: the next look waits until this one returns
            problem = error.strerror or str(error) or "the disk does not answer"
        if (self._steps, problem) != self._listed:
            listed = NodeList(rank, process, self._steps, problem)
            self._gang.listing = await self._directory.call(self._put_list, listed, timeout=FILES_SECONDS)
            self._listed = (self._steps, problem)
        if not problem:
            self._gang.looked = mark

    def _put_list(self, listed: NodeList) -> str:
        """Returns what identifies it. Blocks."""
        data = list_document(listed, self._settings.run_id)
        self._gang.files.put(LIST, listed.process, data)
        return hashlib.sha256(data).hexdigest()[:32]

    # -- uploads ------------------------------------------------------------------------------------------------------

    async def _obey(self, order: UploadOrder | None) -> None:
        if order is None or self._gang.place.rank not in order.digests or order.number == self._answer.number:
            return
        if self._cancelling is not None and not self._cancelling.done():
            return  # at the next turn: it can be about the same checkpoint
        if self._upload is not None:
            await _ended(self._upload)
        self._order, self._answer = order, SentFiles(self._gang.process, order.number)
        self._upload = asyncio.create_task(self._send(order), name="own part")

    async def _send(self, order: UploadOrder) -> None:
        from podwatch.sync.upload.start_child import SetVoid

        def progress(count: int) -> None:
            self._answer = replace(self._answer, sent=count)

        try:
            files = await self._sender.send(order, self._gang.place.rank, progress)
            self._answer = replace(self._answer, done=True, files=files, sent=sum(f.size for f in files))
        except SetVoid as error:
            self._answer = replace(self._answer, failed=f"{error.what} ({error.where})", changed=True)
        except (RemoteError, ConfigurationError) as error:  # of the store: node 0 asks again
            self._answer = replace(self._answer, failed=str(error))
        except Exception as error:  # of this disk, or a bug: it would be the same again
            text = str(error) or type(error).__name__
            self._answer = replace(self._answer, failed=text, changed=True)

    async def _cancel(self, orders: NodeOrders) -> None:
        """Cancel in the store what node 0 has given up, or what an earlier attempt left: unfinished parts cost. A sweep
        finds what cannot be cancelled now."""
        asked = None if orders.upload is None else (orders.upload.step, orders.upload.save_id)
        if self._considered == (known := (orders.abandoned, asked, orders.newest)):
            return
        order = self._order
        if order is not None and to_cancel([(order.step, order.save_id)], orders.abandoned, asked, orders.newest):
            self._order = None
            if self._upload is not None:
                await _ended(self._upload)
        unfinished = await self._run.journal.run(Journal.unfinished)
        for step, save_id in to_cancel(unfinished, orders.abandoned, asked, orders.newest):
            await self._sender.cancel(step, save_id)
        self._considered = known

    # -- deletion -----------------------------------------------------------------------------------------------------

    async def _delete(self, orders: NodeOrders) -> None:
        """Delete this node's part of checkpoints that node 0 has deleted, if it is still what node 0 knows of it."""
        rank, now = self._gang.place.rank, self._run.clock.monotonic()
        for one in self._steps:
            if not (one.settled and one.files and orders.gone.get(one.step, {}).get(rank) == one.digest):
                continue
            key = (one.step, one.digest)
            if one.step not in self.uploading and now - self._tried.get(key, -math.inf) > DELETE_AGAIN_SECONDS:
                self._tried[key] = now
                await self._deletion.worker.call(self._remove, one)

    def _remove(self, one: NodeStep) -> None:
        layout = self._run.layout
        if digest_of(files_on_disk(self._run, one.step)) != one.digest:
            return  # it was saved again meanwhile
        size = sum(f.size for f in one.files)
        reason = "node 0 has deleted its part of this checkpoint, and a newer one is in the store"
        removal = Removal(RemovalKind.STORED_SET, size, reason, one.step, files=len(one.files))
        plan = RemovalPlan((removal,), (), Trigger.NONE, 0, 0, critical=False)
        self._deletion.remover.carry_out(plan, layout.step_paths)


def parts_on_disk(run: Run, step: int) -> tuple[PartFiles, ...]:
    """This node's parts of a checkpoint, without unfinished files. Raises HostError if one cannot be read. Blocks."""
    scans = [scan_part(p, run.workspace.roots) for p in run.layout.steps().get(step, ()) if p.required or p.uploaded]
    if error := next((s.error for s in scans if s.error), ""):
        raise HostError(f"cannot read step {step}: {error}", where=str(run.layout.output_dir))
    found = (s.found for s in scans)
    return tuple(replace(p, files=tuple(f for f in p.files if not is_temporary(f.path))) for p in found)


def files_on_disk(run: Run, step: int) -> tuple[FileEntry, ...]:
    return tuple(f for part in parts_on_disk(run, step) for f in part.files)


class NodeSender:
    """Uploads this node's files of one checkpoint under the names that node 0 has chosen. Publishes nothing."""

    def __init__(self, settings: Settings, run: Run, worker: Worker) -> None:
        from podwatch.sync.upload.uploader import Sender

        self._settings, self._run, self._worker = settings, run, worker
        self._identity = NodeIdentity(settings)
        self._sender = Sender(
            settings, self._identity, NoSets(), run.journal, run.clock, worker, workspace=run.workspace
        )

    async def close(self) -> None:
        await self._sender.close()

    async def send(self, order: UploadOrder, rank: int, progress: Callable[[int], None]) -> tuple[SentFile, ...]:
        """Returns the files that were asked of this node. Raises SetVoid where they are not those of the order,
        PodwatchError and OSError as an upload does."""
        from podwatch.sync.upload.start_child import SetVoid

        where = f"step {order.step}"
        wanted = set(order.paths[rank])
        contents = await self._worker.call(self._contents, order, timeout=FILES_SECONDS)
        if digest_of(contents.files) != order.digests[rank]:
            raise SetVoid("the files of this checkpoint are not those that this node has listed", where=where)
        self._identity.writer_id = order.writer_id
        keys = jobs.keys_for(self._settings.sync.store, self._settings.run_id)
        files = tuple(f for f in jobs.all_files(contents, keys) if f.remote in wanted)
        known = await self._run.journal.run(Journal.objects, order.step, order.save_id)
        done = {path: one for path, one in known.items() if path not in order.again}
        todo = jobs.missing(files, done)
        before = sum(f.size for f in files) - sum(f.size for f in todo)
        if todo:
            await self._sender.send(contents, todo, done, lambda count: progress(before + count), urgent=True)
        again = await self._worker.call(self._contents, order, timeout=FILES_SECONDS)
        if digest_of(again.files) != order.digests[rank]:
            raise SetVoid("the files of this checkpoint changed while this node sent them", where=where)
        return tuple(_sent(done[f.remote]) for f in files)

    async def cancel(self, step: int, save_id: str) -> None:
        """Cancel the unfinished parts of this checkpoint in the store, and forget what was sent of it."""
        started = await self._run.journal.run(Journal.begun, step, save_id)
        uploads = [Upload(one.key, one.upload) for one in started.values() if one.upload]
        if uploads:
            with contextlib.suppress(PodwatchError):
                await self._worker.call(self._cancel, uploads)
        await self._run.journal.run(Journal.forget_save, step, save_id)

    def _cancel(self, uploads: Sequence[Upload]) -> None:
        """Blocks."""
        url = self._settings.sync.store
        known = features_of(self._run.journal.sync, url)
        store = open_store(
            url, credentials_for(self._settings), writer_id=self._identity.writer_id, connections=1, features=known
        )
        try:
            for upload in uploads:
                store.cancel_large(upload)
        finally:
            store.close()

    def _contents(self, order: UploadOrder) -> SetContents:
        """Raises HostError, OSError. Blocks."""
        found = parts_on_disk(self._run, order.step)
        files = tuple(f for part in found for f in part.files)
        name = self._run.layout.name
        described = CheckpointSet(order.step, name, Completeness.COMPLETE, (), 0, len(files), 0.0, order.save_id)
        return SetContents(described, files, (), found)


class NodeIdentity:
    """As ``sync.interfaces.RunSource``: this node writes for node 0."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.writer_id = ""

    def identity(self) -> RunIdentity:
        return RunIdentity(self._settings.run_id, "", self.writer_id, socket.gethostname())

    def credentials(self) -> Credentials | None:
        return credentials_for(self._settings)


class NoSets:
    """As ``sync.interfaces.SetSource``: node 0 judges the checkpoints."""

    sets: tuple[CheckpointSet, ...] = ()

    def contents(self, step: int) -> SetContents:
        raise HostError(f"node 0 judges step {step}")


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _sent(one: UploadedObject) -> SentFile:
    return SentFile(one.path, one.size, one.mtime_ns, one.mode, one.key, one.file_id, one.parts_sha1, one.parts_xxh3)
