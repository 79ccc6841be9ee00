"""A run with real checkpoint files, a real catalogue and journal, and a store of any kind."""

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

from podwatch.checkpoints.known_checkpoints import Catalogue
from podwatch.checkpoints.trainers import make_layout
from podwatch.config.settings import Settings
from podwatch.domain.event import Event
from podwatch.domain.lease import Pod
from podwatch.domain.manifest import Keys, Manifest, Pointer, sha1_hex
from podwatch.domain.run_state import WonClaim
from podwatch.journal.async_journal import AsyncJournal
from podwatch.journal.journal import Journal
from podwatch.policy.who_holds_the_run import Timing
from podwatch.stores.b2 import B2Store, Retry
from podwatch.stores.base import ObjectStore
from podwatch.stores.credentials import Credentials
from podwatch.stores.local import LocalStore
from podwatch.stores.s3 import S3Store
from podwatch.stores.s3_credentials import S3Credentials
from podwatch.sync.interfaces import RunIdentity
from podwatch.sync.lease.protocol import LeaseClock, LeaseProtocol, LeaseTerms, perform
from podwatch.sync.syncer import Syncer
from podwatch.system.clock import SystemClock
from podwatch.system.files import atomic_write
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.hurry import hurrying
from tests.support.s3server import BUCKET as S3_BUCKET
from tests.support.s3server import KEY as S3_KEY
from tests.support.s3server import KEY_ID as S3_KEY_ID
from tests.support.s3server import S3Server
from tests.support.small_reserve import small_reserve  # noqa: F401 - a fixture
from tests.support.warm import children

QUICK = Retry(attempts=4, base=0.01, cap=0.05)


def local_violations(root: Path, keys: Keys) -> list[str]:
    """The promise, checked with nothing but the files: latest.json is absent or everything behind it is whole."""
    path = root / keys.latest
    if not path.exists():
        return []
    pointer = Pointer.from_bytes(path.read_bytes())
    if pointer.step is None:
        return []
    try:
        data = (root / pointer.manifest_key).read_bytes()
        assert sha1_hex(data) == pointer.manifest_sha1
        manifest = Manifest.from_bytes(data)
        for file in manifest.files:
            body = (root / file.key).read_bytes()
            size = manifest.part_size
            hashes = tuple(hashlib.sha1(body[i : i + size]).hexdigest() for i in range(0, len(body), size))
            assert (len(body), hashes) == (file.size, file.parts_sha1), file.path
    except (OSError, AssertionError) as error:
        return [repr(error)]
    return []


class Shifted(SystemClock):
    """``later``: seconds by which its time of day is ahead."""

    def __init__(self, later: float = 0.0) -> None:
        self.later = later

    def wall(self) -> float:
        return super().wall() + self.later


class AtWall(SystemClock):
    """With this time of day."""

    def __init__(self, now: float) -> None:
        self.now = now

    def wall(self) -> float:
        return self.now


@dataclass
class Held:
    """A lease held by the protocol's own rules, without a daemon."""

    claims: LeaseProtocol
    clock: LeaseClock

    def confirm(self, store: ObjectStore) -> tuple[int, float]:
        found: tuple[int, float] = perform(store, self.claims.confirm(), self.clock)
        return found


@dataclass
class World:
    """One pod, and what the syncer asks about it. ``other`` makes a second pod on the same store."""

    directory: Path
    store_url: str
    endpoint: str = ""
    server: B2Server | S3Server | None = None
    writer_id: str = "writer-1"
    lineage: str = "line-1"
    timing: Timing = field(default_factory=lambda: Timing(patience=0.6, claim_wait=0.1, poll=0.05))
    """A living pod of a test gives its signs more often than this."""
    take_over: bool = False
    trains: bool = False
    refused: list[str] = field(default_factory=list)
    key: str = KEY
    key_id: str = KEY_ID
    events: list[Event] = field(default_factory=list)
    backoff: tuple[float, float] = (0.02, 0.1)
    keep_last: int = 3
    finished: bool = False
    observing: bool = False
    parent_step: int | None = None
    has_parent: bool = False
    pinned: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.output = self.directory / "out"
        self.output.mkdir(parents=True, exist_ok=True)
        self.settings = Settings.model_validate(
            {
                "run_id": "run",
                "state_dir": str(self.directory / "state"),
                "trainer": {"layout": "custom", "output_dir": str(self.output)},
                "checkpoints": {
                    "custom": {"step_dir": "checkpoints/step_{step}", "required": ["model.bin"], "last": "DONE"}
                },
                "sync": {
                    "store": self.store_url,
                    "part_size": "5MiB" if self.store_url.startswith("s3://") else "5MB",
                    "connections": 2,
                    "keep_last": self.keep_last,
                    "keep_every": 0,
                },
            }
        )
        self.layout = make_layout(self.settings)
        self.catalogue = Catalogue(self.layout, SystemClock(), settle=0.0, settle_weak=0.0)
        self.keys = Keys("run")
        self.journal = Journal.open(self.directory / "state" / "journal.sqlite")
        self.journals: list[AsyncJournal] = []

    def other(self, name: str, **changes: object) -> "World":
        options = {"endpoint": self.endpoint, "server": self.server, "backoff": self.backoff} | changes
        return World(self.directory.parent / name, self.store_url, **options)  # type: ignore[arg-type]

    def credentials(self) -> Credentials | None:
        if self.store_url.startswith("s3://"):
            return Credentials(s3=S3Credentials(S3_KEY_ID, S3_KEY, endpoint=self.endpoint))
        return Credentials(self.key_id, self.key, self.endpoint) if self.endpoint else None

    def identity(self) -> RunIdentity:
        return RunIdentity(
            "run",
            self.lineage,
            self.writer_id,
            "host",
            ("python", "train.py"),
            {"run_id": "abc"},
            "custom",
            parent_step=self.parent_step,
            has_parent=self.has_parent,
        )

    def trainer_alive(self) -> bool:
        return self.trains

    def ever_started(self) -> bool:
        return False

    def claim(self) -> WonClaim | None:
        """As run.json has it: it outlives a kill."""
        try:
            kept = json.loads(self._claim_file.read_bytes())
        except FileNotFoundError:
            return None
        return WonClaim(**{**kept, "job": tuple(kept["job"])})

    def won(self, claim: WonClaim) -> None:
        atomic_write(self._claim_file, json.dumps(asdict(claim)).encode())

    @property
    def _claim_file(self) -> Path:
        return self.directory / "state" / "claim.json"

    def pins(self) -> dict[int, str]:
        return self.pinned

    def named(self) -> dict[int, str]:
        return {}

    def must_not_train(self, why: str) -> None:
        self.refused.append(why)

    def training_finished(self) -> bool:
        return self.finished

    def withheld(self) -> str:
        return ""

    def observes(self) -> bool:
        return self.observing

    def store(self) -> ObjectStore:
        if self.endpoint:
            credentials = self.credentials()
            assert credentials is not None
            if credentials.s3 is not None:
                return S3Store(S3_BUCKET, credentials.s3, writer_id=self.writer_id, retry=QUICK)
            return B2Store(BUCKET, credentials, writer_id=self.writer_id, retry=QUICK)
        return LocalStore(Path(self.store_url.removeprefix("file://")), writer_id=self.writer_id)

    def write_set(self, step: int, *, size: int = 6_000_000, done: bool = True, tiny: bool = False) -> Path:
        root = self.output / "checkpoints" / f"step_{step}"
        root.mkdir(parents=True, exist_ok=True)
        (root / "model.bin").write_bytes(os.urandom(size))
        if tiny:
            (root / "DONE").write_text("1")
            return root
        (root / "sub").mkdir(exist_ok=True)
        (root / "sub" / "optim.bin").write_bytes(os.urandom(1000))
        (root / "empty").write_bytes(b"")
        (root / "model.bin").chmod(0o640)
        if not (root / "link").is_symlink():
            (root / "link").symlink_to("sub/optim.bin")
        if done:
            (root / "DONE").write_text("1")
        return root

    def scan(self) -> None:
        self.catalogue.rescan()
        self.catalogue.rescan()

    def syncer(self) -> Syncer:
        journal = AsyncJournal(self.journal)
        self.journals.append(journal)
        me = Pod(self.writer_id, f"machine-{self.writer_id}", "boot", "place", f"host-{self.writer_id}")
        return Syncer(
            self.settings,
            self,
            self.catalogue,
            journal,
            SystemClock(),
            self.events.append,
            terms=LeaseTerms(me, self.timing, self.take_over),
            backoff=self.backoff,
        )

    def pointer(self) -> Pointer | None:
        store = self.store()
        data = store.get_bytes(self.keys.latest)
        store.close()
        return None if data is None else Pointer.from_bytes(data)

    def violations(self) -> list[str]:
        if self.server is not None:
            return self.server.violations()
        return local_violations(Path(self.store_url.removeprefix("file://")), self.keys)

    def names(self) -> list[str]:
        return [str(e.name) for e in self.events]


Run = Callable[[World], Awaitable[Syncer]]


async def until(condition: Callable[[], object], seconds: float = 45.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def quick_children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of ordinary priority, and forked from a process that has imported what they need. Not for the tests that look at
    the child itself."""
    with contextlib.ExitStack() as stack:
        if "nice" not in request.node.name:
            stack.enter_context(hurrying())
            if "test_start_child" not in request.node.nodeid:
                stack.enter_context(children())
        yield


@pytest.fixture
def server(tmp_path: Path) -> Iterator[B2Server]:
    with B2Server(tmp_path / "b2") as running:
        yield running


@pytest.fixture
def local(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "pod", f"file://{tmp_path}/store")
    yield world
    world.journal.close()


@pytest.fixture
def b2(tmp_path: Path, server: B2Server) -> Iterator[World]:
    world = World(tmp_path / "pod", f"b2://{BUCKET}", server.url, server)
    yield world
    world.journal.close()


@pytest.fixture
def s3server(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path / "s3") as running:
        yield running


@pytest.fixture
def s3(tmp_path: Path, s3server: S3Server) -> Iterator[World]:
    world = World(tmp_path / "pod", f"s3://{S3_BUCKET}", s3server.url, s3server)
    yield world
    world.journal.close()


@pytest.fixture
def s3versions(s3server: S3Server, s3: World) -> World:
    """In a bucket that keeps versions."""
    s3server.traits(versions=True)
    return s3


@pytest.fixture
def s3careless(s3server: S3Server, s3: World) -> World:
    """On a server that checks no checksum, ignores conditions, and whose ETags say nothing."""
    s3server.traits(verify=[], conditions="ignore", etag="opaque", composite=False, copies="empty")
    return s3


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("local", "s3", "s3versions", "s3careless")]
"""What is particular to each store is in tests/stores/test_conformance.py, of the default suite."""


@pytest.fixture(params=["b2", *SLOW], ids=lambda name: {"local": "file"}.get(name, name))
def world(request: pytest.FixtureRequest) -> World:
    made: World = request.getfixturevalue(request.param)
    return made


@pytest.fixture
async def run() -> AsyncIterator[Run]:
    running: list[Syncer] = []

    async def start(world: World) -> Syncer:
        syncer = world.syncer()
        await syncer.start()
        running.append(syncer)
        return syncer

    yield start
    for syncer in running:
        await syncer.stop()
