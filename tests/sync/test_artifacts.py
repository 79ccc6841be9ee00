"""Configuration, ends of logs and incident bundles reach the store: bounded, without a secret, and never in the way."""

import asyncio
import hashlib
import io
import os
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.errors import ConfigurationError
from podwatch.domain.safe_names import check_relative_path
from podwatch.domain.secrets import MASK, register
from podwatch.sensors.log_tail import Sources
from podwatch.store.runs.start import RunStart, start_evidence
from podwatch.store.runs.start_record import read_start
from podwatch.stores.base import ObjectStore
from podwatch.sync.upload import artifacts
from podwatch.sync.upload.artifacts import (
    MOST_LOGS,
    Artefact,
    Artifacts,
    LogEnds,
    bundles,
    configs,
    plain_name,
)
from podwatch.system.clock import SystemClock
from tests.sync.conftest import World

pytestmark = pytest.mark.slow

SECRET = "s3cr3t-value-of-this-pod"
LOG_BYTES = 4000


class Later(SystemClock):
    """The pod's clock."""

    def __init__(self, pod: "Pod") -> None:
        self.pod = pod

    def wall(self) -> float:
        return super().wall() + self.pod.later


class PodSources:
    """What the pod of a test keeps of itself."""

    def __init__(self, pod: "Pod", host: str = "pod-1") -> None:
        self.pod, self.host = pod, host
        self.incidents, self.log_bytes = pod.incidents, LOG_BYTES

    def logs(self) -> Sources:
        return Sources(self.pod.out, ("logs/*.log",))

    def configs(self) -> tuple[str, ...]:
        return tuple(self.pod.paths)

    def holds(self) -> bool:
        return self.pod.holds

    def start(self) -> list[Artefact]:
        found = start_evidence(self.pod.start) if self.pod.start is not None else []
        return [Artefact(one.kind, one.name, one.data, one.fixed) for one in found]

    def learn_secrets(self) -> None:
        register(*self.pod.secrets)

    def may_write(self) -> bool:
        return True

    def may_delete(self) -> bool:
        return self.pod.delete

    def trouble(self, problem: str) -> None:
        self.pod.told.append(problem)


@dataclass
class Pod:
    world: World
    secrets: frozenset[str] = frozenset({SECRET})
    later: float = 0.0
    paths: list[str] = field(default_factory=list)
    delete: bool = True
    start: RunStart | None = None
    holds: bool = True
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out, self.incidents = self.world.output, self.world.directory / "incidents"

    def artefacts(self, host: str = "pod-1") -> Artifacts:
        return Artifacts(self.world.store, self.world.keys, PodSources(self, host), Later(self))

    def log(self, name: str, text: str) -> Path:
        path = self.out / "logs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def config(self, name: str, text: str) -> Path:
        path = self.world.directory / name
        path.write_text(text)
        path.chmod(0o644)
        self.paths = [*{*self.paths, str(path)}]
        return path

    def bundle(self, number: int, text: str = "what was seen\n") -> Path:
        directory = self.incidents / str(number)
        directory.mkdir(parents=True)
        (directory / "trainer.log").write_text(text)
        (directory / "finding.json").write_text("{}")
        return directory

    def stored(self) -> dict[str, bytes]:
        store = self.world.store()
        found = {}
        for item in store.identify(store.list(f"{self.world.keys.root}/")):
            data = store.get_bytes(item.key)
            assert data is not None
            assert item.ours
            found[item.key.removeprefix(f"{self.world.keys.root}/")] = data
        store.close()
        return found


@pytest.fixture
def pod(world: World) -> Pod:
    return Pod(world)


async def once(artefacts: Artifacts, *, urgent: bool = False) -> None:
    await artefacts.store(urgent=urgent)
    assert artefacts.problem == ""


async def test_all_three_kinds_without_a_secret(pod: Pod) -> None:
    pod.log("trainer.log", f"step 1\nkey {SECRET}\nWANDB_API_KEY={'a' * 40}\nstep 2\n")
    pod.config("rl.toml", f'[wandb]\napi_key = "{SECRET}"\nname = "run"\n')
    pod.bundle(3, f"died with {SECRET}\n")
    artefacts = pod.artefacts()
    await once(artefacts)
    stored = pod.stored()
    assert sorted(n.partition("/")[0] for n in stored) == ["config", "incidents", "logs"]
    assert stored["logs/pod-1__logs__trainer.log"] == b"step 1\nkey [removed]\nWANDB_API_KEY=[removed]\nstep 2\n"
    (config,) = [data for name, data in stored.items() if name.startswith("config/")]
    assert b'name = "run"' in config
    (name,) = [n for n in stored if n.startswith("incidents/")]
    assert name.endswith("Z-3.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(stored[name])) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive}  # type: ignore[union-attr]
    assert files["trainer.log"] == b"died with [removed]\n"
    assert not any(SECRET.encode() in data for data in (*stored.values(), *files.values()))
    await artefacts.stop(last=False)


async def test_only_what_changed_is_sent(b2: World) -> None:
    pod = Pod(b2)
    assert b2.server is not None
    trainer = pod.log("trainer.log", "1\n")
    pod.log("inference.log", "2\n")
    pod.config("rl.toml", "a = 1")
    pod.bundle(1)
    artefacts = pod.artefacts()
    await once(artefacts)
    first = b2.server.calls()
    assert first["b2_upload_file"] == 4
    await once(artefacts)
    assert b2.server.calls() == first, "nothing changed: not one call"
    trainer.write_text("1\n3\n")
    await once(artefacts)
    assert b2.server.calls()["b2_upload_file"] == 5
    names = [v["name"] for v in b2.server.versions()]
    assert len(names) == len(set(names)), "what was written over is removed"
    await artefacts.stop(last=False)
    again = pod.artefacts()
    await once(again)
    assert b2.server.calls()["b2_upload_file"] == 7, "a new podwatch knows config and bundles, and sends the logs"
    await again.stop(last=True)


async def test_a_key_that_may_not_delete_collects_no_versions(b2: World) -> None:
    assert b2.server is not None
    b2.server.add_key("weak", "s", bucket=b2.server.bucket, capabilities=["listFiles", "readFiles", "writeFiles"])
    b2.key_id, b2.key = "weak", "s"
    pod = Pod(b2)
    artefacts = pod.artefacts()
    for number in range(6):
        pod.log("trainer.log", f"{number}\n")
        await once(artefacts)
    assert len(b2.server.versions("trainer.log")) == 2
    await once(artefacts, urgent=True)
    assert len(b2.server.versions("trainer.log")) == 3, "an incident or the end is worth a version"
    await artefacts.stop(last=False)


async def test_store_trouble_is_a_remark(b2: World) -> None:
    assert b2.server is not None
    pod = Pod(b2)
    pod.log("trainer.log", "1\n")
    artefacts = pod.artefacts()
    b2.server.stop()
    await artefacts.store()
    assert "cannot be reached" in artefacts.problem
    await artefacts.store()
    assert len(pod.told) == 1
    b2.server.start()
    await once(artefacts)
    assert "logs/pod-1__logs__trainer.log" in pod.stored()
    await artefacts.stop(last=False)


async def test_a_store_that_hangs_never_reaches_the_loop(b2: World) -> None:
    assert b2.server is not None
    pod = Pod(b2)
    pod.log("trainer.log", "1\n")
    b2.server.fault("*", "hang", seconds=30, count=10)
    artefacts = pod.artefacts()
    began = time.monotonic()
    await artefacts.store(within=0.2)
    await artefacts.store(within=0.2)
    assert time.monotonic() - began < 15
    assert artefacts.problem
    await artefacts.stop(last=False)


async def test_unknown_secrets_mean_nothing_is_sent(local: World) -> None:
    pod = Pod(local)
    pod.log("trainer.log", "1\n")

    class Unknown(PodSources):
        def learn_secrets(self) -> None:
            raise ConfigurationError("env file cannot be read")

    blind = Artifacts(local.store, local.keys, Unknown(pod), SystemClock())
    await blind.store()
    assert "env file" in blind.problem
    assert pod.stored() == {}
    await blind.stop(last=True)
    assert pod.stored() == {}


async def test_swept_by_its_own_rules(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "KEEP", {"config": 2, "logs": 2, "incidents": 2})
    pod = Pod(world)
    store: ObjectStore = world.store()
    for number in range(4):
        store.put_bytes(f"{world.keys.artefacts('logs')}old-{number}", b"x")
        store.put_bytes(f"{world.keys.artefacts('incidents')}old-{number}.tar.gz", b"x")
    store.put_bytes(f"{world.keys.step(1)}save/x", b"no artefact")
    for number in range(3):
        pod.bundle(number)
    artefacts = pod.artefacts()
    await once(artefacts)
    stored = pod.stored()
    assert len([n for n in stored if n.startswith("logs/")]) == 2
    assert len([n for n in stored if n.startswith("incidents/")]) == 2
    assert "step_1/save/x" in stored
    pod.later = 2 * artifacts.SWEEP_SECONDS
    await once(artefacts)
    assert pod.stored() == stored, "what was swept is not sent again"
    await artefacts.stop(last=False)
    store.close()


def start_of_pod(pod: Pod, **more: object) -> RunStart:
    text = f'run_id = "r"\nkey = "{SECRET}"\n'
    return RunStart("r", text, "/etc/podwatch/podwatch.toml", "/app", tuple(pod.paths), **more)  # type: ignore[arg-type]


async def test_the_start_is_stored_scrubbed_and_its_record_names_each_object(world: World) -> None:
    pod = Pod(world)
    config = pod.config("config.toml", f'token = "{SECRET}"\n')
    private = pod.config("private.toml", "x = 1\n")
    private.chmod(0o600)
    key = pod.config("my.key", "x = 1\n")
    binary = pod.config("model.bin", "\0")
    env = str(world.directory / ".env")
    pod.start = start_of_pod(pod, secret={env: ("HF_TOKEN", "HF_HOME")}, settings={"gpu.poll": "2.0"})
    artefacts = pod.artefacts()
    await once(artefacts)
    await artefacts.stop(last=False)
    stored = pod.stored()
    assert not [name for name, data in stored.items() if SECRET.encode() in data]
    record = read_start(stored["config/bootstrap.json"], run_id="r")
    texts = {f.path: stored[f"config/{f.object}"].decode() for f in (record.config, *record.files)}
    assert texts == {
        "/podwatch.toml": f'run_id = "r"\nkey = "{MASK}"\n',
        str(config): f'token = "{MASK}"\n',
        env: f"HF_TOKEN={MASK}\nHF_HOME={MASK}\n",
    }
    for file in (record.config, *record.files):
        assert hashlib.sha256(stored[f"config/{file.object}"]).hexdigest() == file.sha256
    assert [(f.path, f.permissions, f.secret) for f in record.files] == [
        (str(config), 0o644, False),
        (env, 0o600, True),
    ]
    assert {one.path for one in record.left_out} == {str(private), str(key), str(binary)}
    assert record.settings == {"gpu.poll": "2.0"}
    assert record.directory == "/app"


async def test_the_start_is_stored_as_soon_as_this_pod_holds_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "HELD_POLL_SECONDS", 0.05)
    pod = Pod(world, holds=False)
    pod.start = start_of_pod(pod)
    made = pod.artefacts()
    waits = asyncio.create_task(made.when_held())
    await asyncio.sleep(0.3)
    assert made.rounds == 0
    pod.holds = True
    await asyncio.wait_for(waits, 30)
    assert "config/bootstrap.json" in pod.stored()
    await made.stop(last=False)


async def test_the_files_of_the_current_start_outlive_every_sweep(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "KEEP", {"config": 2, "logs": 2, "incidents": 2})
    pod = Pod(world)
    for number in range(4):
        pod.config(f"c{number}.toml", f"a = {number}\n")
    pod.start = start_of_pod(pod)
    artefacts = pod.artefacts()
    await once(artefacts)
    needed = {name for name in pod.stored() if name.startswith("config/")}
    assert len(needed) == 6
    store: ObjectStore = world.store()
    for number in range(3):
        store.put_bytes(f"{world.keys.artefacts('config')}newer-{number}", b"x")
    store.close()
    pod.later = artifacts.KEEP_SECONDS + 2 * artifacts.SWEEP_SECONDS
    await once(artefacts)
    left = {name for name in pod.stored() if name.startswith("config/")}
    assert needed <= left
    assert len(left) < 9, "what no start needs is swept"
    await artefacts.stop(last=False)


async def test_nothing_is_deleted_where_deletions_are_only_reported(local: World) -> None:
    pod = Pod(local, delete=False)
    store = local.store()
    for number in range(40):
        store.put_bytes(f"{local.keys.artefacts('logs')}old-{number}", b"x")
    artefacts = pod.artefacts()
    await once(artefacts)
    assert len(pod.stored()) == 40
    await artefacts.stop(last=False)


async def test_soon_is_one_round(local: World) -> None:
    pod = Pod(local)
    pod.bundle(1)
    artefacts = pod.artefacts()
    for _ in range(3):
        artefacts.soon(after=0.05)
    async with asyncio.timeout(60):
        while not artefacts.rounds:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert artefacts.rounds == 1
    assert len(pod.stored()) == 1
    artefacts.soon(after=60)
    await artefacts.stop(last=True)


# -- reading


def logs(root: Path, pattern: str) -> list[Artefact]:
    return LogEnds(LOG_BYTES).read(Sources(root, (pattern,)), "h")


@given(
    st.lists(
        st.one_of(
            st.text(alphabet="abc\n", max_size=60).map(lambda t: ("more", t)),
            st.text(alphabet="xyz\n", max_size=200).map(lambda t: ("anew", t)),
        ),
        max_size=12,
    )
)
def test_read_on_is_read_whole(moves: list[tuple[str, str]]) -> None:
    """However a log grows: what was read bit by bit is a tail of what a fresh reader sees, or the same."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        path, ends, written = root / "a.log", LogEnds(100), ""
        path.write_text("")
        for move, text in moves:
            if move == "more":
                with path.open("a") as file:
                    file.write(text)
                written += text
            else:
                path.unlink()
                path.write_text(text)
                written = text
            os.utime(path, (time.time() + 3600,) * 2)  # still being written, however long this takes
            (found,) = ends.read(Sources(root, ("a.log",)), "h")
            whole = written.rpartition("\n")[0] + "\n" if "\n" in written else ""
            data = found.data.decode()
            assert len(data) <= 100
            assert whole.endswith(data)
            assert len(whole) >= 100 or data == whole


def test_a_last_line_without_an_end_is_shown_once_it_is_still(tmp_path: Path) -> None:
    path, ends = tmp_path / "a.log", LogEnds(LOG_BYTES)
    path.write_text("whole\nWANDB_API_KEY=abc")
    os.utime(path, (time.time() + 3600,) * 2)  # still being written, however long this takes
    source = Sources(tmp_path, ("a.log",))
    assert ends.read(source, "h")[0].data == b"whole\n"
    os.utime(path, (time.time() - 10, time.time() - 10))
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]"
    path.write_text("whole\nWANDB_API_KEY=abcdefghij\nmore\n")
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]\nmore\n"
    path.write_text("whole\nWANDB_API_KEY=abcdefghij\nplain-value-1\n")
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]\nplain-value-1\n"
    register("plain-value-1")
    assert ends.read(source, "h")[0].data == b"whole\nWANDB_API_KEY=[removed]\n[removed]\n"


def test_a_log_is_bounded_and_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {n} WANDB_API_KEY={SECRET}\n" for n in range(10_000)))
    (found,) = logs(tmp_path, "*.log")
    lines = found.data.decode().splitlines()
    assert LOG_BYTES / 2 < len(found.data) <= LOG_BYTES
    assert lines[-1] == "line 9999 WANDB_API_KEY=[removed]"
    assert all(line.startswith("line ") for line in lines)
    assert SECRET.encode() not in found.data


def test_a_rotated_log_brings_its_predecessor(tmp_path: Path) -> None:
    (tmp_path / "a.log.1").write_text("x" * 9000 + "\nbefore\n")
    (tmp_path / "a.log").write_text("after\n")
    (found,) = logs(tmp_path, "a.log")
    assert found.data == b"before\nafter\n"
    (tmp_path / "a.log.1").unlink()
    (tmp_path / "a.log.1").symlink_to("/etc/passwd")
    (found,) = logs(tmp_path, "a.log")
    assert found.data == b"after\n"


def test_no_more_than_so_many_logs_and_only_files(tmp_path: Path) -> None:
    for number in range(MOST_LOGS + 5):
        path = tmp_path / f"{number:02}.log"
        path.write_text("x\n")
        os.utime(path, (number, number))
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "link.log").symlink_to("/etc/passwd")
    found = logs(tmp_path, "*.log")
    assert sorted(a.name for a in found) == [f"h__{n:02}.log" for n in range(5, MOST_LOGS + 5)]


def test_a_file_that_looks_like_a_key_is_no_configuration(tmp_path: Path) -> None:
    names = {"rl.toml": 0o644, ".env": 0o644, "prod.env": 0o644, "private.toml": 0o600, "id.pem": 0o644, "big": 0o644}
    for name, mode in names.items():
        (tmp_path / name).write_bytes(b"x" * (2 << 20) if name == "big" else b"a = 1")
        (tmp_path / name).chmod(mode)
    (tmp_path / "binary").write_bytes(b"\0\1")
    found = configs([str(tmp_path / n) for n in (*names, "binary", "absent")])
    assert [a.name.partition("-")[2] for a in found] == ["rl.toml"]


def test_bundles_that_are_no_bundles(tmp_path: Path) -> None:
    assert bundles(tmp_path / "absent", (), 0.0) == []
    (tmp_path / ".3.partial").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "link").symlink_to("/etc/passwd")
    (found,) = bundles(tmp_path, (), 0.0)
    assert found.name.endswith("-7.tar.gz")
    with tarfile.open(fileobj=io.BytesIO(found.data)) as archive:
        assert archive.getnames() == []
    assert bundles(tmp_path, {found.name}, 0.0) == []
    assert bundles(tmp_path, (), time.time() + 60) == []


@given(st.text(max_size=300))
def test_any_name_becomes_a_safe_one(text: str) -> None:
    name = plain_name(text)
    assert check_relative_path(name) == name
    assert "/" not in name
    assert not name.startswith(".")
    assert name.isascii()
