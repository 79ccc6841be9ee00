"""``podwatch bootstrap`` as a real process on a pretended bare pod: what it shows, what it refuses, what it writes."""

import contextlib
import json
import os
import re
import shlex
import stat
from pathlib import Path

import pytest

from podwatch.app.backup.post_mortem import start_of
from podwatch.config.loading import load_text
from podwatch.domain import secrets
from podwatch.domain.secrets import MASK
from podwatch.store.keys import RunKeys
from podwatch.store.objects.directory import DirectoryObjects
from podwatch.store.runs.start import start_evidence
from podwatch.store.runs.start_record import OBJECT
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.mounts import small_mount

pytestmark = pytest.mark.slow

SECRET = "K005veryrandom47secret11value"
DIGEST = re.compile(r"^  digest +([0-9a-f]{64})$", re.M)


class Pods:
    """Pod A has stored its start; pod B, which is ``machine``, has nothing but podwatch and a key."""

    def __init__(self, machine) -> None:
        self.machine, self.home = machine, machine.directory
        self.store_dir, self.app, self.etc = self.home / "store", self.home / "app", self.home / "etc"
        for directory in (self.store_dir, self.app):
            directory.mkdir()
        self.url = f"file://{self.store_dir}"
        self.config = self.home / "config.toml"
        self.keys = RunKeys("r")

    def toml(self, more: str = "", command: str = "") -> str:
        command = command or f'["/bin/sh", "-c", "exit 0", "@", "{self.config}"]'
        return (
            f'run_id = "r"\nstate_dir = "{self.home}/state"\n[trainer]\nlayout = "custom"\n'
            f'output_dir = "{self.app}/out"\ncwd = "{self.app}"\ncommand = {command}\n{more}\n'
            f'[checkpoints.custom]\nparts = "step_{{step}}"\n[sync]\nstore = "{self.url}"\n'
        )

    def stored(self, store=None, *, files: dict[Path, str] | None = None, more: str = "", command: str = "") -> None:
        """Pod A stores its start; then its disk is gone."""
        files = {self.config: "lr = 1\n"} if files is None else files
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o600 if path.name == ".env" else 0o644)
        text = self.toml(more, command)
        environ = {"PODWATCH_DIRECTORY": str(self.app)}
        loaded = load_text(text, Path("/etc/podwatch/podwatch.toml"), environ=environ)
        store = store or DirectoryObjects(self.store_dir)
        old = os.environ.get("PODWATCH_DIRECTORY")
        os.environ["PODWATCH_DIRECTORY"] = str(self.app)
        try:
            secrets.register(SECRET)
            for one in start_evidence(start_of(loaded)):
                assert SECRET.encode() not in one.data
                store.put(f"{self.keys.evidence('config')}{one.name}", one.data)
        finally:
            secrets.forget()
            os.environ.pop("PODWATCH_DIRECTORY") if old is None else os.environ.update(PODWATCH_DIRECTORY=old)
        for path in files:
            path.unlink()

    def call(self, *arguments: str, code: int, **env: str) -> str:
        arguments = ("bootstrap", self.url, "r", "--dir", str(self.etc), *arguments)
        done = self.machine.podwatch(*arguments, **env)
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert SECRET not in done.stdout + done.stderr
        return done.stdout + done.stderr

    def place(self, *arguments: str, code: int = 0, **env: str) -> str:
        return self.call(*arguments, "--no-start", code=code, **env)

    def record(self) -> Path:
        return self.store_dir / self.keys.evidence("config") / OBJECT

    def rewrite(self, **changes: object) -> None:
        """Somebody who can write the bucket changes the first file of the record."""
        document = json.loads(self.record().read_text())
        document["files"][0] |= changes
        DirectoryObjects(self.store_dir).put(f"{self.keys.evidence('config')}{OBJECT}", json.dumps(document).encode())

    def untouched(self) -> bool:
        return not (self.etc / "podwatch.toml").exists() and not self.config.exists()


@pytest.fixture
def pods(machine) -> Pods:
    return Pods(machine)


def test_without_trust_it_shows_all_and_writes_nothing(pods: Pods) -> None:
    pods.stored()
    shown = pods.call(code=77)
    assert f"command    /bin/sh -c 'exit 0' @ {pods.config}" in shown
    assert re.search(rf"file       {pods.config}  7 B, sha256 [0-9a-f]{{16}}$", shown, re.M), shown
    assert f"file       {pods.etc}/podwatch.toml" in shown
    assert pods.untouched()
    assert not pods.etc.exists()
    digest = DIGEST.search(shown)
    assert digest
    assert f"podwatch bootstrap {pods.url} r --digest {digest[1]} --dir {pods.etc}" in shown


def test_the_line_that_it_prints_is_the_line_that_starts(pods: Pods) -> None:
    pods.stored()
    shown = pods.place(code=77)
    (line,) = (text.partition("start:  ")[2] for text in shown.splitlines() if "start:  " in text)
    done = pods.machine.podwatch(*shlex.split(line)[1:])
    assert done.returncode == 0, done.stderr
    assert pods.config.read_text() == "lr = 1\n"
    assert stat.S_IMODE((pods.etc / "podwatch.toml").stat().st_mode) == 0o600
    assert "not started; to start: podwatch --config" in done.stdout


def test_another_digest_than_the_stored_one_starts_nothing(pods: Pods) -> None:
    pods.stored()
    assert "another start than the digest that you passed" in pods.call("--digest", "0" * 64, code=77)
    digest = DIGEST.search(pods.call(code=77))
    assert digest
    pods.rewrite(mode="0755")
    pods.call("--digest", digest[1], code=77)
    assert pods.untouched()
    pods.call("--digest", "abc", code=64)
    pods.call("--digest", digest[1], "--trust", code=64)


def test_a_removed_value_is_named_and_filled_from_the_variable_of_its_name(pods: Pods) -> None:
    pods.stored(files={pods.config: f'a = 1\nWANDB_API_KEY = "{SECRET}"\n'})
    said = pods.place("--trust", code=78)
    assert f"{pods.config}:2 (WANDB_API_KEY) was removed as a secret: set WANDB_API_KEY" in said
    assert pods.untouched()
    assert "by hand" in pods.place("--trust", code=78, WANDB_API_KEY='x" evil="1')
    assert "wrote" in pods.place("--trust", WANDB_API_KEY="newkey12345")
    assert pods.config.read_text() == 'a = 1\nWANDB_API_KEY = "newkey12345"\n'
    assert "on this pod already" in pods.place("--trust"), "a second call needs no variable"


@pytest.mark.parametrize("name", ["B2_APPLICATION_KEY", "AWS_SECRET_ACCESS_KEY", "PODWATCH_HTTP__TOKEN"])
@pytest.mark.parametrize("secret", [False, True])
def test_the_pods_own_key_fills_nothing_that_the_bucket_names(pods: Pods, name: str, secret: bool) -> None:
    """Neither in the command nor in a file that the command names, also if the bucket calls that one secret. Nor is
    such a file readable for others, whatever the bucket says."""
    command = f'["/bin/sh", "-c", "exit 0", "{name}={SECRET}", "@", "{pods.config}"]'
    pods.stored(files={pods.config: f'{name} = "{SECRET}"\n'}, command=command)
    if secret:
        pods.rewrite(secret=True, mode="0644")
    key = "key-of-this-pod-0123456789"
    env = {"B2_APPLICATION_KEY_ID": "0012", "B2_APPLICATION_KEY": "another-key", name: key}
    said = pods.place("--trust", code=78, **env)
    assert said.count("by hand") == 2, said
    assert key not in said
    assert not any(key in path.read_text() for path in pods.etc.rglob("*") if path.is_file())
    assert pods.untouched()


def test_everything_that_would_run_is_shown(pods: Pods) -> None:
    pods.stored(
        more="""
start_before = [["/opt/before", "1"]]
stop_also = [["/opt/after"]]
env = { LD_PRELOAD = "/app/x.so" }
[[hooks]]
name = "h"
on = ["ended"]
command = ["/opt/hook"]
[[hooks]]
name = "c"
on = ["check"]
command = ["/opt/check"]
[evaluation]
command = ["/opt/evaluate", "{checkpoint}"]
[notify]
command = ["/opt/notify"]
[end_pod]
command = ["/opt/end"]
[wandb]
enabled = true
python = "/opt/python"
"""
    )
    shown = pods.call(code=77)
    programs = "before after hook check evaluate notify end python"
    assert set(re.findall(r"^  also runs  /opt/(\w+)", shown, re.M)) == set(programs.split()), shown
    assert "LD_PRELOAD=/app/x.so" in shown


def test_a_removed_value_is_filled_by_hand(pods: Pods) -> None:
    pods.stored(files={pods.config: f'a = 1\napi_key = "{SECRET}"\n'})
    said = pods.place("--trust", code=78)
    assert f"{pods.config}:2 (api_key) was removed as a secret: write the file by hand" in said
    (line,) = (text.partition("as stored: ")[2] for text in said.splitlines() if "as stored: " in text)
    assert f'api_key = "{MASK}"' in pods.machine.podwatch(*shlex.split(line)[1:]).stdout
    pods.config.write_text(f'a = 1\napi_key = "{MASK}"\n')
    assert "exists with another content" in pods.place("--trust", code=78)
    pods.config.write_text('a = 1\napi_key = "two words"\n')
    pods.place("--trust")
    assert pods.config.read_text() == 'a = 1\napi_key = "two words"\n'


@pytest.mark.root
def test_what_another_user_wrote_beside_is_not_used(pods: Pods) -> None:
    pods.stored()
    pods.place("--trust")
    os.chown(pods.etc / "bootstrap-r.json", 65534, 65534)
    pods.config.write_text("changed here\n")
    pods.place("--trust", code=78)


def test_the_env_file_is_made_of_the_pods_environment(pods: Pods) -> None:
    env = pods.home / ".env"
    pods.stored(files={pods.config: "", env: f"WANDB_API_KEY={SECRET}\nHF_HOME=/data/hf\n"},
                more=f'env_file = "{env}"')  # fmt: skip
    said = pods.place("--trust", code=78, WANDB_API_KEY="wandb-of-this-pod")
    assert "(HF_HOME) was removed as a secret: set HF_HOME" in said
    assert "WANDB_API_KEY" not in said
    pods.place("--trust", WANDB_API_KEY="wandb-of-this-pod", HF_HOME="/x")
    assert env.read_text() == "WANDB_API_KEY=wandb-of-this-pod\nHF_HOME=/x\n"
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    stored = b"".join(p.read_bytes() for p in pods.store_dir.rglob("*") if p.is_file())
    assert b"/data/hf" not in stored


def test_an_env_file_that_is_here_stays(pods: Pods) -> None:
    env = pods.home / ".env"
    pods.stored(files={pods.config: "", env: "A=1\n"}, more=f'env_file = "{env}"')
    env.write_text("OTHER=2\n")
    env.chmod(0o600)
    pods.place("--trust")
    assert env.read_text() == "OTHER=2\n"


def test_a_file_of_other_content_is_never_replaced_silently(pods: Pods) -> None:
    pods.stored()
    pods.config.write_text("mine\n")
    said = pods.place("--trust", code=78)
    assert f"{pods.config} exists with another content, which podwatch does not replace: move it away" in said
    assert pods.config.read_text() == "mine\n"
    assert not (pods.etc / "podwatch.toml").exists()


def test_a_full_disk_leaves_nothing_half_written(pods: Pods) -> None:
    disk = pods.home / "disk"
    with small_mount(disk, 256 << 10) as mounted:
        if not mounted:
            pytest.skip("cannot mount here")
        config = disk / "config.toml"
        pods.stored(files={config: "lr = 1\n" * 1000}, command=f'["/bin/true", "{config}"]')
        with (disk / "full").open("wb", buffering=0) as full, contextlib.suppress(OSError):
            while True:
                full.write(bytes(4096))
        said = pods.place("--trust", code=69)
        assert f"podwatch cannot write a file of the run: No space left on device ({config})" in said
        assert [p.name for p in disk.iterdir()] == ["full"]


@pytest.mark.parametrize("link", ["file", "directory", "dangling"])
def test_no_link_below_an_allowed_directory_is_followed(pods: Pods, tmp_path_factory, link: str) -> None:
    outside = tmp_path_factory.mktemp("outside")
    target = pods.home / "sub" / "config.toml"
    pods.stored(files={target: "new\n"}, command=f'["/bin/true", "{target}"]')
    victim = outside / "config.toml"
    if link == "directory":
        target.parent.rmdir()
        target.parent.symlink_to(outside)
    else:
        target.symlink_to(victim)
        if link == "file":
            victim.write_text("theirs\n")
    said = pods.place("--trust", code={"file": 78, "directory": 69, "dangling": 78}[link])
    assert ("a symbolic link is on the way" in said) is (link == "directory"), said
    assert not victim.exists() or victim.read_text() == "theirs\n"
    assert not (pods.etc / "podwatch.toml").exists()


@pytest.mark.parametrize(
    "path",
    ["/etc/cron.d/podwatch-test", "/usr/local/bin/podwatch-test", "{home}/.bashrc", "{home}/.ssh/authorized_keys",
     "{home}/app/out/step_5/x", "{home}/state/r/journal.sqlite", "{home}/etc/podwatch.toml"],
)  # fmt: skip
def test_a_bucket_cannot_choose_where_files_go(pods: Pods, path: str) -> None:
    pods.stored()
    path = path.format(home=pods.home)
    pods.rewrite(path=path)
    said = pods.place("--trust", code=78)
    assert f"{path} is not written" in said
    assert pods.untouched()
    assert not Path(path).exists()


@pytest.mark.parametrize("path", ["/root/../etc/x", "relative", "/a/../../b", "//x"])
def test_a_path_that_is_none_voids_the_record(pods: Pods, path: str) -> None:
    pods.stored()
    pods.rewrite(path=path)
    assert "the record of the run's start is not usable" in pods.place("--trust", code=69)
    assert pods.untouched()


def test_a_file_elsewhere_is_for_the_operator_to_bring(pods: Pods, tmp_path_factory) -> None:
    other = tmp_path_factory.mktemp("elsewhere") / "config.toml"
    pods.stored()
    pods.rewrite(path=str(other))
    said = pods.place("--trust", code=78)
    assert f"it is outside {pods.etc}" in said
    other.write_text("lr = 1\n")
    pods.place("--trust")


def test_contents_that_are_not_what_the_record_names(pods: Pods) -> None:
    pods.stored()
    (stored,) = pods.record().parent.glob("*-config.toml")
    DirectoryObjects(pods.store_dir).put(f"{pods.keys.evidence('config')}{stored.name}", b"lr = 2\n")
    assert "not what the record names" in pods.place("--trust", code=69)
    assert pods.untouched()


def test_what_the_image_or_the_operator_must_bring(pods: Pods) -> None:
    secret = pods.home / "private.toml"
    pods.stored(files={pods.config: "", secret: "x"}, command=f'["nosuchprogram", "{pods.config}", "{secret}"]')
    assert "nosuchprogram, the command's program, is not on this pod" in pods.place("--trust", code=78)
    key = pods.home / "id_rsa.txt"
    pods.stored(files={pods.config: "", key: "x"}, command=f'["true", "{pods.config}", "{key}"]')
    assert f"{key} is named by the command and not stored (its name is that of a key file)" in pods.place(
        "--trust", code=78
    )
    pods.app.rmdir()
    assert f"{pods.app}, the command's directory, is not on this pod" in pods.place("--trust", code=78)
    assert pods.untouched()


def test_another_store_or_run_in_the_configuration(pods: Pods) -> None:
    pods.stored()
    config = pods.store_dir / pods.keys.evidence("config")
    copied = RunKeys("copy")
    for path in [p for p in config.iterdir() if p.is_file() and not p.name.startswith(".")]:
        data = path.read_bytes().replace(b'"run_id": "r"', b'"run_id": "copy"')
        DirectoryObjects(pods.store_dir).put(f"{copied.evidence('config')}{path.name}", data)
    done = pods.machine.podwatch("bootstrap", pods.url, "copy", "--trust", "--no-start", "--dir", str(pods.etc))
    assert done.returncode == 78
    assert "podwatch.toml is of run r: " in done.stderr
    other = pods.home / "second"
    pods.store_dir.rename(other)
    done = pods.machine.podwatch("bootstrap", f"file://{other}", "r", "--trust", "--no-start", "--dir", str(pods.etc))
    assert done.returncode == 78
    assert f"podwatch.toml names {pods.url}: bootstrap from that" in done.stderr


def test_a_run_that_stored_nothing(pods: Pods) -> None:
    said = pods.call(code=69)
    assert "the store holds no start of run r" in said
    assert "copy podwatch.toml to this pod" in said
    assert pods.machine.podwatch("bootstrap", pods.url, "../r").returncode == 64


def test_a_second_call_continues_with_what_is_here(pods: Pods) -> None:
    pods.stored()
    digest = DIGEST.search(pods.place("--trust"))
    assert digest
    pods.config.write_text("changed here\n")
    pods.place("--trust")
    assert pods.config.read_text() == "changed here\n"
    pods.config.unlink()
    pods.place("--digest", digest[1])
    assert pods.config.read_text() == "lr = 1\n", "a disk that lost a file"

    mine = pods.config.read_text()
    pods.stored(files={pods.config: "stored later\n"})
    pods.config.write_text(mine)
    said = pods.place("--digest", digest[1])
    assert "the store holds a newer start of this run; this pod continues" in said
    assert pods.config.read_text() == mine
    pods.config.unlink()
    (pods.etc / "bootstrap-r.json").unlink()
    pods.place("--trust")
    assert pods.config.read_text() == "stored later\n"

    pods.store_dir.rename(pods.home / "away")
    assert "continues with the files that are on this pod" in pods.place("--trust")
    pods.store_dir.write_text("not a store")  # that it is away would be waited for
    pods.place("--digest", "0" * 64, code=69)


def test_a_key_that_can_only_read(pods: Pods, tmp_path: Path) -> None:
    from podwatch.store.objects.b2 import B2Access
    from podwatch.store.objects.open import open_objects

    with B2Server(tmp_path / "b2") as server:
        server.add_key("readonly00001", "its-secret-value", capabilities=["listBuckets", "listFiles", "readFiles"])
        pods.url = f"b2://{BUCKET}"
        store = open_objects(pods.url, B2Access(KEY_ID, KEY, server.url))
        pods.stored(store)
        store.close()
        read = {"B2_APPLICATION_KEY_ID": "readonly00001", "B2_APPLICATION_KEY": "its-secret-value"}
        said = pods.place("--trust", code=77, B2_ENVIRONMENT=server.url, **read)
        assert "this key can only read" in said
        assert "writeFiles" in said
        assert pods.untouched()
        write = {"B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY}
        pods.place("--trust", B2_ENVIRONMENT=server.url, **write)
        assert pods.config.read_text() == "lr = 1\n"
        for path in (pods.etc / "podwatch.toml", pods.config):
            assert KEY not in path.read_text()
        assert "the store has no credentials" in pods.place("--trust", code=78)
