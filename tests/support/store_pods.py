"""Pods that share one simulated object store: each runs the product's own blocking code as a coroutine, so that its
requests are slow, lost, late, cut in two by a freeze, or its last ones. One schedule is a seed.

After every operation that the store carries out it is judged, by what is really there, whether the newest pointer lies,
and whether anything was deleted that must stay. The judge uses no rule of the product.
"""

import functools
import hashlib
import heapq
import itertools
import json
import math
import random
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

from podwatch.domain.checkpoint import FileEntry
from podwatch.domain.errors import PodwatchError, RemoteError
from podwatch.domain.lease import Claim, Heartbeat, HolderState, LeaseAction, Pod
from podwatch.store.documents import SaveIntent
from podwatch.store.interfaces import Author
from podwatch.store.inventory import DocumentCache, take_inventory
from podwatch.store.keys import RunKeys
from podwatch.store.lease import Lease
from podwatch.store.objects.errors import ObjectMissing, ObjectTooLarge, StoreOutage, too_late
from podwatch.store.publish import LeaseLost, PiecesMissing, Publisher
from podwatch.store.remove import SaveRemover
from podwatch.store.retention import RetentionRules, named_lately, plan

KEYS = RunKeys("run", "prefix")
CLIENT_TIMEOUT, LATEST_APPLY, STALEST = 60.0, 85.0, 25.0
PIECE = 100
RULES = RetentionRules(keep_last=2, keep_every=6, superseded=400.0, named=1500.0, unfinished=1500.0, keep_pointers=8)
START = 1.7e9
FOREIGN = b"of somebody else"


@functools.lru_cache(4096)
def parsed(data: bytes) -> Any:
    return json.loads(data)


class Killed(BaseException):
    """kill -9."""


@dataclass(frozen=True)
class Item:
    key: str
    size: int
    wall: float
    hash: str
    data: bytes = b""


@dataclass
class Tale:
    """What happened in a schedule."""

    seed: int
    problems: list[str] = field(default_factory=list)
    published: int = 0
    removed: int = 0
    swept: int = 0
    resent: int = 0
    takeovers: int = 0
    repointed: int = 0
    kills: int = 0
    operations: int = 0
    reused: int = 0


class World:
    def __init__(self, seed: int, seconds: float, trouble: float = 1.0) -> None:
        self.random, self.now, self.end, self.trouble = random.Random(seed), 0.0, seconds, trouble
        self.objects: dict[str, Item] = {}
        self.names: list[str] = []
        self.log: list[tuple[float, float, str, Item | None]] = []
        self.foreign: set[str] = set()
        self.outages: list[tuple[float, float]] = []
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.tale = Tale(seed)
        self.judge = Judge(self)
        self.pods: list[SimPod] = []

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (max(when, self.now), next(self.order), call))

    def play(self) -> Tale:
        while self.heap and self.heap[0][0] <= self.end:
            self.now, _, call = heapq.heappop(self.heap)
            call()
        for pod in self.pods:
            pod.kill()
        return self.tale

    def below(self, prefix: str) -> list[str]:
        return self.names[bisect_left(self.names, prefix) : bisect_left(self.names, prefix + "\U0010ffff")]

    def put(self, key: str, data: bytes, writer: str) -> None:
        # The service's clock has tenths of a second: two claims may well have the same time.
        item = Item(key, len(data), START + round(self.now, 1), f"sha1:{hashlib.sha1(data).hexdigest()}", data)
        before = self.objects.get(key)
        self._note(key, before)
        self.objects[key] = item
        if before is None:
            insort(self.names, key)
        self.judge.after_put(item, before, writer)

    def delete(self, key: str, writer: str) -> None:
        if (before := self.objects.get(key)) is None:
            return
        self.judge.before_delete(before, writer)
        self._note(key, before)
        del self.objects[key]
        self.names.remove(key)
        self.judge.look()

    def _note(self, key: str, before: Item | None) -> None:
        """Each change shows in listings at a time of its own."""
        rng = self.random
        hidden = rng.uniform(0, STALEST) if rng.random() < 0.15 * self.trouble else 0.0
        self.log.append((self.now, self.now + hidden, key, before))

    def list(self, prefix: str) -> list[Item]:
        found = {name: self.objects[name] for name in self.below(prefix)}
        for when, shown, key, before in reversed(self.log):
            if when < self.now - STALEST:
                break
            if shown > self.now and key.startswith(prefix):
                if before is None:
                    found.pop(key, None)
                else:
                    found[key] = before
        return [found[name] for name in sorted(found)]

    def is_away(self) -> bool:
        return any(a <= self.now < b for a, b in self.outages)


class Judge:
    """What must be true of the store, whatever happens."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pointers: dict[str, tuple[tuple[int, int], float, dict[str, Any]]] = {}
        self.top: dict[str, Any] | None = None
        self.claims: dict[int, list[tuple[float, str, str]]] = {}
        self.holders: dict[int, str] = {}
        self.replaced: dict[tuple[int, str], float] = {}
        """When a save stopped being the newest."""
        self.condemned: set[str] = set()
        """Saves whose manifest was deleted rightly."""

    def say(self, text: str) -> None:
        self.world.tale.problems.append(f"{self.world.now:.1f}: {text}")

    def after_put(self, item: Item, before: Item | None, writer: str) -> None:
        name = item.key.removeprefix(KEYS.root)
        if item.key in self.world.foreign and item.data != FOREIGN:
            self.say(f"{writer} replaced a foreign object {name}")
        if match := re.fullmatch(r"claims/(\d+)-(\w+)", name):
            self.claims.setdefault(int(match[1]), []).append((item.wall, match[2], writer))
        if writer != "stranger" and (match := re.fullmatch(r"pointers/(\d+)-(\d+)-\w+\.json", name)):
            self._pointer(item, (int(match[1]), int(match[2])), writer)
        if name.startswith("step_"):
            self.look()

    def _pointer(self, item: Item, order: tuple[int, int], writer: str) -> None:
        said = parsed(item.data)
        first = min(self.claims.get(order[0], []), default=(0.0, "", "nobody"))[2]
        if first != writer:
            self.say(f"{writer} published in generation {order[0]}, which {first} won")
        for other, _, what in self.pointers.values():
            if other == order and (what["step"], what["save_id"]) != (said["step"], said["save_id"]):
                self.say(f"two pointers of {order} name different saves")
        newest = max((o for o, _, _ in self.pointers.values()), default=(0, 0))
        self.pointers[item.key] = (order, item.wall, said)
        if order > newest:
            if self.top is not None:
                self.replaced[self.top["step"], self.top["save_id"]] = self.world.now
            self.top = said
        self.look()

    def look(self) -> None:
        if self.top is not None and self.top["step"] is not None and (wrong := self._lie(self.top)):
            self.say(wrong)

    def _lie(self, top: dict[str, Any]) -> str:
        folder = KEYS.save(top["step"], top["save_id"])
        manifest = self.world.objects.get(folder + "manifest.json")
        if manifest is None:
            return f"the newest pointer names step {top['step']}, which has no manifest"
        if f"sha256:{hashlib.sha256(manifest.data).hexdigest()}" != top["manifest_hash"]:
            return "the newest pointer names another manifest"
        for file in parsed(manifest.data)["files"]:
            name, whole = f"{folder}{file['part']}/{file['path']}", file["size"] <= PIECE
            for number, digest in enumerate(file["hashes"]):
                there = self.world.objects.get(name if whole else f"{name}.piece-{number:05}")
                if there is None or there.hash != digest:
                    return f"the newest pointer lies: {name}"
        return ""

    def before_delete(self, item: Item, writer: str) -> None:
        name, now, objects = item.key.removeprefix(KEYS.root), self.world.now, self.world.objects
        if item.key in self.world.foreign:
            self.say(f"{writer} deleted a foreign object {name}")
        if name.startswith("pointers/"):
            order, wall, _ = self.pointers.get(item.key, ((0, 0), 0.0, {}))
            if order == max(o for o, _, _ in self.pointers.values()) or START + now - wall < RULES.named:
                self.say(f"{writer} deleted a pointer that counts: {name}")
        match = re.fullmatch(r"step_(\d+)/(\w+)/(.+)", name)
        if match is None or writer == "stranger":
            return
        save, folder = (int(match[1]), match[2]), KEYS.save(int(match[1]), match[2])
        if match[3] == "manifest.json":
            self._manifest(save, parsed(item.data), writer)
            self.condemned.add(folder)
        elif folder + "manifest.json" in objects:
            self.say(f"{writer} deleted {name} before its manifest")
        elif folder not in self.condemned:
            newest = max(objects[k].wall for k in self.world.below(folder) if k not in self.world.foreign)
            if START + now - newest < RULES.unfinished and self.world.below(folder) != [item.key]:
                self.say(f"{writer} swept an upload that is {START + now - newest:.0f} s old: {name}")
                self.condemned.add(folder)  # say it once
            elif START + now - newest >= RULES.unfinished:
                self.condemned.add(folder)

    def _manifest(self, save: tuple[int, str], said: dict[str, Any], writer: str) -> None:
        now, found = self.world.now, []
        for order, wall, what in self.pointers.values():
            if (what["step"], what["save_id"]) == save:
                found.append(order)
                if START + now - wall < RULES.named:
                    self.say(f"{writer} deleted {save}, which a pointer of the last day names")
        if self.top is not None and (self.top["step"], self.top["save_id"]) == save:
            self.say(f"{writer} deleted the newest save {save}")
        if now - self.replaced.get(save, -1e9) < RULES.superseded:
            self.say(f"{writer} deleted {save} too soon after it was replaced")
        orders = []
        for key in self.world.names:
            if key.endswith("/manifest.json") and key not in self.world.foreign:
                other = parsed(self.world.objects[key].data)
                orders.append((other["generation"], other["seq"]))
        if (said["generation"], said["seq"]) >= max(orders):
            self.say(f"{writer} deleted the last save that was stored")

    def holds(self, generation: int, pod: str) -> None:
        if self.holders.setdefault(generation, pod) != pod:
            self.say(f"{pod} and {self.holders[generation]} both hold generation {generation}")


class PodObjects:
    """The store as one pod reaches it."""

    url = "sim://store"

    def __init__(self, pod: "SimPod") -> None:
        self.pod, self.world = pod, pod.world

    def put(self, key: str, source: bytes, *, until: float = math.inf) -> None:
        self._request(lambda: self.world.put(key, source, self.pod.name), body=True, until=until)

    def read(self, key: str, limit: int) -> bytes:
        found = self._request(lambda: self.world.objects.get(key))
        if found is None:
            raise ObjectMissing(key)
        if found.size > limit:
            raise ObjectTooLarge(key)
        return bytes(found.data)

    def list(self, prefix: str) -> Iterator[Item]:
        return iter(self._request(lambda: self.world.list(prefix)))

    def delete(self, keys: Sequence[str], *, older: bool = False, until: float = math.inf) -> None:
        for key in () if older else keys:
            self._request(lambda key=key: self.world.delete(key, self.pod.name), until=until)

    def _request(self, apply: Callable[[], Any], *, body: bool = False, until: float = math.inf) -> Any:
        world, pod, rng = self.world, self.pod, self.world.random
        world.tale.operations += 1
        pod.left_to_live -= 1
        if pod.left_to_live == 0 and rng.random() < 0.5:
            pod.die()
        if rng.random() < 0.3:
            pod.sleep(rng.uniform(0, 2))  # a name is resolved, a connection made: a freeze can begin there
        if pod.boottime() > until:
            raise too_late(self.url)
        if world.is_away():
            pod.sleep(rng.uniform(0.1, 20))
            raise StoreOutage("away", where=self.url)
        slow, lost = rng.random() < 0.02 * world.trouble, rng.random() < 0.01 * world.trouble
        travel = rng.uniform(5, CLIENT_TIMEOUT + 20) if slow else rng.expovariate(5.0)
        back = rng.uniform(0.01, 10) if slow else 0.05
        sent, answer = world.now, list[Any]()

        def arrive() -> None:
            if body and pod.frozen_until > world.now and rng.random() < 0.5:
                return world.at(pod.frozen_until + 0.1, lambda: answer.append(apply()))  # bytes lay in a socket
            answer.append(apply())
            return None

        world.at(sent + min(travel, LATEST_APPLY), arrive)
        if pod.left_to_live == 0:
            pod.die()
        pod.sleep(min(travel + back, CLIENT_TIMEOUT))
        if lost or not answer or world.now - sent > CLIENT_TIMEOUT:
            pod.sleep(max(0.0, CLIENT_TIMEOUT - (world.now - sent)))
            raise StoreOutage("no answer", where=self.url)
        return answer[0]


@dataclass
class Save:
    step: int
    save_id: str
    files: tuple[FileEntry, ...]
    content: dict[str, bytes]
    sent: dict[str, str] = field(default_factory=dict)


@dataclass
class State:
    """What a life of podwatch leaves on the disk."""

    writer: str
    claim: Claim | None = None
    sent: dict[str, dict[str, str]] = field(default_factory=dict)


class SimPod:
    """A machine with a podwatch, a trainer and a disk."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.name, self.number = world, f"writer{number}", number
        self.me = Pod(f"writer{number}", f"machine{number}", f"boot{number}", "place", f"pod-{number}")
        self.offset, self.skew = world.random.uniform(0, 1e6), world.random.choice((0.0, -40000.0, 40000.0, 5e6))
        self.state = State(self.name)
        self.saves: list[Save] = []
        self.training = False
        self.frozen_until = self.left_to_live = -1.0
        self.running: greenlet | None = None
        self.next_save = self.next_beat = 0.0
        self.lives = 0
        self.robbed = False
        """Somebody deletes a piece of its next upload."""
        world.pods.append(self)

    # -- what the product asks ----------------------------------------------------------------------------------------

    def boottime(self) -> float:
        return self.world.now + self.offset

    def wall(self) -> float:
        return START + self.world.now + self.skew

    def trainer_alive(self) -> bool:
        return self.training

    def last_claim(self) -> Claim | None:
        return self.state.claim

    def claimed(self, claim: Claim) -> None:
        self.state.claim = claim

    def job_ended(self, process: str) -> bool:
        return False

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.running is not None:
            return
        self.lives += 1
        self.running = greenlet(self._main)
        self._resume(self.running)

    def kill(self) -> None:
        if self.running is not None and self.running is not getcurrent():
            victim, self.running = self.running, None
            if victim:  # it has begun
                victim.throw(Killed)

    def die(self) -> None:
        """In the middle of an operation. Its training dies with it half of the time."""
        self.left_to_live = -1
        self.world.tale.kills += 1
        self.running = None
        raise Killed

    def power_cut(self, *, disk: bool) -> None:
        """The machine is gone, and another one has its name soon; without its disk it is an empty one."""
        self.kill()
        self.training = False
        lives = self.lives
        boot = f"boot{self.number}x{lives}"
        if not disk:
            self.name, self.state, self.saves = f"writer{self.number}x{lives}", State(""), []
            self.state.writer = self.name
        self.me = Pod(self.name, f"machine{self.number}", boot, "place", f"pod-{self.number}")

    def freeze(self, seconds: float) -> None:
        self.frozen_until = max(self.frozen_until, self.world.now + seconds)

    def sleep(self, seconds: float) -> None:
        me = getcurrent()
        self.world.at(self.world.now + seconds, lambda: self._resume(me))
        self.world_loop().switch()

    def world_loop(self) -> greenlet:
        loop = getcurrent().parent
        assert loop is not None
        return loop

    def _resume(self, who: greenlet) -> None:
        if who is not self.running:
            return
        if self.frozen_until > self.world.now:
            self.world.at(self.frozen_until, lambda: self._resume(who))
            return
        who.switch()

    def _main(self) -> None:
        try:
            self._live()
        except Killed:
            return
        except Exception as error:
            self.world.tale.problems.append(f"{self.world.now:.1f}: {self.name} crashed: {error!r}")
        self.running = None

    # -- podwatch -----------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        world, rng = self.world, self.world.random
        store, self.cache = PodObjects(self), DocumentCache()
        self.store = store
        hexes = lambda: f"{rng.getrandbits(48):012x}"  # noqa: E731
        self.lease = Lease(self.me, KEYS, self, self, stands_by=True, nonce=hexes)
        self.publisher = Publisher(store, KEYS, self.lease, self, nonce=hexes)
        self.remover = SaveRemover(store, KEYS, self.lease, self)
        self.published = set[str]()
        while True:
            try:
                self._turn()
            except PiecesMissing as error:
                world.tale.resent += len(error.names)
                for save in self.saves:
                    for name in error.names:
                        save.sent.pop(name, None)
            except LeaseLost:
                self.training = False
            except RemoteError:
                if self.lease.decision.act is not LeaseAction.HOLD:
                    self.lease.unanswered()
                self._gate()
            except PodwatchError as error:
                world.tale.problems.append(f"{world.now:.1f}: {self.name}: {error}")
                return
            self.sleep(rng.uniform(10, 40))

    def _turn(self) -> None:
        lease, world = self.lease, self.world
        if lease.decision.act is not LeaseAction.HOLD:
            lease.update(self.store)
        self._gate()
        self._beat()
        if lease.decision.act is LeaseAction.HOLD:
            world.judge.holds(lease.generation, self.name)
        if self.training and world.now >= self.next_save:
            self.next_save = world.now + world.random.uniform(150, 350)
            self._save()
        if lease.may_upload and self.saves and self.saves[-1].save_id not in self.published:
            self._send(self.saves[-1])
        elif lease.decision.act is LeaseAction.HOLD and world.random.random() < 0.04:
            self._step_back()

    def _gate(self) -> None:
        decision = self.lease.decision
        if decision.stop or decision.act is LeaseAction.SUPERSEDED:
            self.training = False
        elif not decision.why_not:
            self.training = True

    def _beat(self) -> None:
        if self.world.now >= self.next_beat and self.lease.may_upload:
            self.next_beat = self.world.now + 60
            self.lease.beat(self.store, HolderState.RUNNING, Heartbeat())
            self._gate()

    def _save(self) -> None:
        step = max([s.step for s in self.saves] + [0]) + 1
        text = f"{self.name} {self.lives} {step} {self.world.now:.3f} ".encode()
        files = {"w/model": text.ljust(250, b"."), "w/state": text.ljust(30, b"."), "w/empty": b""}
        mtime = int(self.world.now * 1e9)
        listed = tuple(FileEntry(name[2:], "w", len(data), mtime) for name, data in files.items())
        self.saves.append(Save(step, f"{self.world.random.getrandbits(48):012x}", listed, files))

    def _send(self, save: Save) -> None:
        inventory = take_inventory(self.store, KEYS, self.cache)
        if (found := inventory.find_save(save.step, save.files)) is not None and found == inventory.newest:
            self.published.add(save.save_id)
            return
        begun = inventory.find_unfinished(save.step, save.files, self.name, within=RULES.unfinished / 2)
        save_id = begun.save_id if begun is not None else found.save_id if found is not None else ""
        if not save_id:
            save_id = save.save_id = f"{self.world.random.getrandbits(48):012x}"
            save.sent = {}
        intent = SaveIntent("run", save.step, save_id, self.name, max(1, self.lease.generation), 1.7e9, "custom", PIECE,
                            save.files) if begun is None or begun.intent is None else begun.intent  # fmt: skip
        save.save_id, sent = save_id, self.state.sent.setdefault(save_id, {})
        self.world.tale.reused += begun is not None
        if begun is None and found is None:
            self.publisher.begin(intent)
        for piece in intent.objects():
            if found is not None or piece.name in sent:
                continue
            if not self.lease.may_upload:
                return
            data = save.content[piece.name.partition(".piece-")[0]][piece.offset : piece.offset + piece.size]
            self.store.put(KEYS.save(save.step, save_id) + piece.name, data)
            sent[piece.name] = f"sha1:{hashlib.sha1(data).hexdigest()}"
            self._beat()
        if self.robbed:
            self.robbed = False
            self.world.at(self.world.now + 1, lambda: _lose_a_piece(self.world, self))
            self.sleep(40)
        while self.lease.decision.act is LeaseAction.SETTLE:
            self.sleep(min(30.0, self.lease.decision.wait))
            self.lease.update(self.store)
            self._gate()
        if self.lease.decision.act is not LeaseAction.HOLD:
            return
        author = Author("run", self.name, lineage="main", layout="custom")
        hashes = dict(sent)
        if found is not None and found.manifest is not None:
            hashes = {p.name: p.hash for p in found.manifest.objects()}
        try:
            self.publisher.publish(intent, hashes, author)
        except PiecesMissing as error:
            for name in error.names:
                sent.pop(name, None)
            raise
        self.published.add(save_id)
        self.world.tale.published += 1
        self._retain()

    def _retain(self) -> None:
        inventory = take_inventory(self.store, KEYS, self.cache)
        live = {(s.step, s.save_id) for s in self.saves[-1:]}
        named = named_lately(self.publisher.named, self.boottime(), RULES) if self.named_counts else frozenset()
        wanted = plan(inventory, RULES, live=live, named=named)
        removed = self.remover.carry_out(wanted, inventory)
        self.world.tale.removed += sum("never" not in why for _, _, why in removed.saves)
        self.world.tale.swept += sum("never" in why for _, _, why in removed.saves)

    named_counts = True

    def _step_back(self) -> None:
        inventory = take_inventory(self.store, KEYS, self.cache)
        whole = [s for s in inventory.saves if not s.problem]
        if whole:
            save = self.world.random.choice([*whole, None])
            self.publisher.repoint(save, Author("run", self.name, lineage="main"))
            self.world.tale.repointed += 1


def run(seed: int, *, pods: int = 2, hours: float = 1.4) -> Tale:
    """One random schedule."""
    world = World(seed, hours * 3600)
    rng = world.random
    for name in ("notes.txt", "pointers/readme.txt", "claims/README", "step_7/abc/w/x", "step_x/y/z", "logs/a/b"):
        world.foreign.add(KEYS.root + name)
        world.put(KEYS.root + name, FOREIGN, "stranger")
    for number in range(1, pods + 1):
        pod = SimPod(world, number)
        world.at(0.0 if number == 1 else rng.choice((0.0, 2.0, 600.0, rng.uniform(0, world.end / 2))), pod.start)
    for _ in range(rng.choice((0, 1, 2))):
        begin = rng.uniform(0, world.end)
        world.outages.append((begin, begin + rng.choice((30, 200, 900))))
    for _ in range(rng.randint(3, 8)):
        world.at(rng.uniform(60, world.end * 0.9), lambda: _trouble(world))
    return world.play()


def _trouble(world: World) -> None:
    rng = world.random
    pod, what = (
        rng.choice(world.pods),
        rng.choice(("kill", "kill", "freeze", "freeze", "cut", "wipe", "stranger", "lose")),
    )
    if what == "kill":
        pod.left_to_live = rng.randint(1, 12)
        for after in (30, 120, 400):
            world.at(world.now + after * rng.uniform(0.5, 2), pod.start)
        if rng.random() < 0.3:
            world.at(world.now + 100, lambda: setattr(pod, "training", False))
    elif what == "freeze":
        pod.freeze(rng.choice((40, 200, 700, 1500)) * rng.uniform(0.6, 1.4))
    elif what in ("cut", "wipe"):
        pod.power_cut(disk=what == "cut")
        world.at(world.now + rng.uniform(5, 900), pod.start)
    elif what == "stranger":
        _stranger(world)
    else:
        pod.robbed = True


def _stranger(world: World) -> None:
    """Puts own files beside ours, and names and documents that are wrong."""
    folders = [k.removesuffix("intent.json") for k in world.names if k.endswith("/intent.json")]
    for folder in folders[-2:]:
        world.foreign.add(folder + "w/note.txt")
        world.put(folder + "w/note.txt", FOREIGN, "stranger")
    junk = f"{KEYS.root}step_9/{world.random.getrandbits(40):010x}/"
    for name in ("manifest.json", "w/model"):
        world.foreign.add(junk + name)
        world.put(junk + name, FOREIGN, "stranger")


def _lose_a_piece(world: World, pod: SimPod) -> None:
    """Somebody deletes a piece of an upload whose pod is down."""
    pod.kill()
    for key in reversed(world.names):
        folder = "/".join(key.split("/")[:5]) + "/"
        intent = world.objects.get(folder + "intent.json")
        own = intent is not None and parsed(intent.data)["writer_id"] == pod.name
        if own and ".piece-" in key and folder + "manifest.json" not in world.objects:
            world.delete(key, "stranger")
            break
    world.at(world.now + world.random.uniform(STALEST, 100), pod.start)  # no listing shows it any more
