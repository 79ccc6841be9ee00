"""Secrets planted wherever they can be, and every outlet and file of a real daemon searched for them (promise 11)."""

import base64
import io
import json
import stat
import tarfile
import urllib.parse
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.asking import running, status, wait_reason
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.daemon import DaemonProcess
from tests.support.rig import TRAINER, Rig

pytestmark = pytest.mark.slow

PLANTED = {
    "env_file, by its name": "planted-Wandb-5f3a9c",
    "env_file, by its look": "Zx81Qw92Er73Ty64Ui55",
    "env_file, dotted": "secret_pod_0f1e2d3c4b5a69788796a5b4c3d2e1f0.Pd18Wq29Re37Yt46",
    "env_file, printed only in pieces": "planted-Wrap-66-0a1b-c2d3-e4f5-0617-2839-4a5b",
    "environment": "planted-Hub-77-b1c2",
    "flag and value": "planted-Flag-88-d3e4",
    "flag=value": "planted-Equal-99-f5a6",
    "override": "planted-Hydra-11-a7b8",
    "file that the command names": "planted-Toml-22-c9d0",
    "notify URL": "T0K3N-planted-4711",
    "inference URL": "planted-Infer-33-e1f2",
    "store key": KEY,
    "store key id": KEY_ID,
    "log, known by its form": "sk-plantedABCDEFGH0123456789xyz",
    "log, known by its name": "planted-Named-44-a3b4",
    "log, in a URL": "planted-Url-55-c5d6",
    "engine log": "hf_plantedABCDEFGH0123456789",
}
PEM = [
    "-----BEGIN PRIVATE KEY-----",
    "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCplantedPem1",
    "BKcwggSjAgEAAoIBAQC7VJTUt9Us8cKjplantedPem2",
    "-----END PRIVATE KEY-----",
]
WRAPPED = PLANTED["env_file, printed only in pieces"]
NEEDLES = [*PLANTED.values(), *PEM[1:3]]


def spoken() -> list[str]:
    """What the trainer prints before it ends: the known ones bare and encoded, the others as their shape has it."""
    bare = [value for where, value in PLANTED.items() if not where.startswith(("log", "engine")) and value != WRAPPED]
    first = bare[0]
    return [
        *(f"RuntimeError: refused: {value}" for value in bare),
        f"Authorization: Basic {base64.b64encode(b'me:' + first.encode()).decode()}",
        f"GET /x?y={urllib.parse.quote(bare[1], safe='')} {json.dumps({'a': bare[2]})}",
        f"split {first[:9]}",
        f"    {first[9:]}",
        *(f"│ {piece:<20} │" for piece in pieces(WRAPPED)),
        *pieces(base64.b64encode(b"u" * 70 + WRAPPED.encode() + b"v" * 70).decode(), 76),
        f"client({PLANTED['log, known by its form']})",
        f"password: '{PLANTED['log, known by its name']}'",
        f"https://me:{PLANTED['log, in a URL']}@example.com/x failed",
        *PEM,
        "ModuleNotFoundError: No module named 'nothing'",
    ]


def pieces(text: str, width: int = 9) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def forms(needle: str) -> list[bytes]:
    return [needle.encode(), base64.b64encode(b"me:" + needle.encode())[4:-4]]


def leaks(data: bytes) -> list[str]:
    found = [needle for needle in NEEDLES for form in forms(needle) if form in data]
    first = PLANTED["env_file, by its name"]
    if first[:9].encode() in data and first[9:].encode() in data:
        found.append(f"{first} (split)")
    shown = [piece for piece in pieces(WRAPPED) if piece.encode() in data]
    encoded = pieces(base64.b64encode(b"u" * 70 + WRAPPED.encode() + b"v" * 70).decode()[96:150])
    found += [f"{piece} of {WRAPPED}" for piece in (shown if len(shown) > 1 else ())]
    return found + [f"{piece} of {WRAPPED} in base64" for piece in encoded if piece.encode() in data]


def test_no_outlet_and_no_file_shows_a_secret(rig: Rig, tmp_path: Path) -> None:
    env_file, toml, told = rig.root / "secrets.env", rig.root / "work" / "run.toml", rig.root / "told"
    given = {env_file, toml, rig.root / "podwatch.toml"}
    env_file.write_text(
        f"WANDB_API_KEY={PLANTED['env_file, by its name']}\nANY_SETTING={PLANTED['env_file, by its look']}\n"
        f"LAMBDA={PLANTED['env_file, dotted']}\nPRINTED_TOKEN={WRAPPED}\n"
        f"B2_APPLICATION_KEY_ID={KEY_ID}\nB2_APPLICATION_KEY={KEY}\n"
    )
    env_file.chmod(0o600)
    toml.write_text(f'[wandb]\napi_key = "{PLANTED["file that the command names"]}"\n')
    rig.trainer_flags = [
        "--wandb.api-key", PLANTED["flag and value"], f"--x-token={PLANTED['flag=value']}", "@", "run.toml",
        f"++logger.wandb.key={PLANTED['override']}",
    ]  # fmt: skip
    (rig.output / "logs").mkdir(parents=True)
    (rig.output / "logs" / "inference.log").write_text(f"engine token={PLANTED['engine log']}\nCUDA error\n")
    with B2Server(tmp_path / "b2") as server:
        environ = {"B2_ENVIRONMENT": server.environment()["B2_ENVIRONMENT"], "HF_TOKEN": PLANTED["environment"]}
        daemon = rig.daemon(
            environ,
            sync__store=f"b2://{BUCKET}",
            trainer__env_file=str(env_file),
            notify__command=["/bin/sh", "-c", f"cat >> {told}"],
            notify__urls=[f"http://127.0.0.1:9/hook/{PLANTED['notify URL']}"],
            inference__urls=[f"http://me:{PLANTED['inference URL']}@127.0.0.1:9"],
            record__enabled=True,
        ).start()
        running(daemon, rig, step=5)
        daemon.wait_event("published", 60)
        rig.order(exit=1, say=spoken())
        wait_reason(daemon, "gave-up", 90)
        daemon.wait_for(lambda: told.exists() and "gave" in told.read_text(), 60, "the notice")
        wait_reason(daemon, "notify-failing", 60)
        root = f"{rig.run_id}/podwatch/"
        daemon.wait_for(
            lambda: (
                any("/incidents/" in key for key in stored(server, root))
                and any(b"ModuleNotFoundError" in data for key, data in stored(server, root).items() if "/logs/" in key)
            ),
            60,
            "bundle and log in the store",
        )
        shown = dict(asked(daemon))
        assert b"ModuleNotFoundError" in shown["/status"], "the finding quotes the trainer's last lines"
        shown |= command_lines(rig)
        shown |= {f"while it runs: {name}": data for name, data in files(rig, given).items()}
        assert daemon.stop() == 0
        shown |= {f"store: {key}": unpacked(data) for key, data in stored(server, root).items()}
    shown |= {f"after: {name}": data for name, data in offline(daemon)}
    shown |= files(rig, given)
    kinds = (
        "logs",
        "store: ",
        "while it runs: ",
        "-wal",
        "recording",
        "incidents/",
        "run.json",
        "told",
        "quarantine/1/",
    )
    leaking = {name: leaked for name, data in shown.items() if (leaked := leaks(data))}
    assert leaking == {}, "\n".join(f"{name}: {leaked}" for name, leaked in leaking.items())
    assert [kind for kind in kinds if not any(kind in name for name in shown)] == [], sorted(shown)
    modes(rig)


COMMANDS = (
    "status", "events", "incidents", "incidents 1", "config show", "check", "checkpoints", "restart --dry-run",
)  # fmt: skip


def stored(server: B2Server, root: str) -> dict[str, bytes]:
    """What is small; the checkpoint's own files are the trainer's."""
    return {name: data for name, data in server.objects(root).items() if "/step_" not in name or name.endswith(".json")}


def asked(daemon: DaemonProcess) -> Iterator[tuple[str, bytes]]:
    url = status(daemon)["daemon"]["http_url"]
    for path in ("/status", "/events?limit=1000", "/metrics", "/healthz", "/readyz", "/livez", "/"):
        try:
            with urllib.request.urlopen(url + path, timeout=20) as answer:
                yield path, answer.read()
        except urllib.error.HTTPError as error:
            yield path, error.read()
    for command in COMMANDS:
        for form in ((), ("--json",)):
            done = daemon.command(*command.split(), *form)
            yield f"podwatch {command} {form}", (done.stdout + done.stderr).encode()
    done = daemon.command("logs", "-n", "1000")
    assert "ModuleNotFoundError" in done.stdout
    yield "podwatch logs", (done.stdout + done.stderr).encode()


def offline(daemon: DaemonProcess) -> Iterator[tuple[str, bytes]]:
    for command in ("status", "events", "incidents", "config show"):
        done = daemon.command(*command.split(), "--json")
        yield f"podwatch {command}", (done.stdout + done.stderr).encode()


def command_lines(rig: Rig) -> dict[str, bytes]:
    """Of every process that is ours; the trainer's own is the trainer's."""
    found = {}
    for pid in processes.all_pids():
        words = processes.command(pid)
        if str(rig.root) in " ".join(words) and str(TRAINER) not in words:
            found[f"command line of {pid}"] = "\0".join(words).encode()
    assert found
    return found


def files(rig: Rig, given: set[Path]) -> dict[str, bytes]:
    """Every file but those that hold the secrets (and the copy of the configuration), the trainer's own (moved ones,
    too), and what the supervisor needs to start it."""
    found = {}
    state = rig.root / "state" / rig.run_id
    own = [rig.control, rig.output / "logs", state / "logs", state / "supervisor"]
    kept = {state / "last-good.json", *rig.output.parent.glob(".podwatch/outputs/user/quarantine/*/*/inference.log")}
    for path in rig.root.rglob("*"):
        if path.is_file() and path not in given | kept and not any(part in path.parents for part in own):
            found[f"file {path.relative_to(rig.root)}"] = unpacked(path.read_bytes())
    return found


def unpacked(data: bytes) -> bytes:
    """With what is inside an archive or a compressed file."""
    if data[:2] != b"\x1f\x8b":
        return data
    plain = zlib.decompressobj(wbits=31).decompress(data)  # a recording that is being written has no end yet
    try:
        with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
            members = (archive.extractfile(member) for member in archive)
            return b"\n".join(member.read() for member in members if member is not None)
    except tarfile.TarError:
        return plain


def modes(rig: Rig) -> None:
    """What holds the command or the trainer's words as they are is closed to other users."""
    state = rig.root / "state" / rig.run_id
    for path in (*state.rglob("*"), *rig.output.parent.rglob("run.json*")):
        mode = stat.S_IMODE(path.lstat().st_mode)
        above = [parent for parent in path.parents if rig.root in parent.parents]
        reached = all(stat.S_IMODE(parent.stat().st_mode) & 0o001 for parent in above)
        assert not (path.is_file() and mode & 0o004 and reached), f"{path}: {mode:04o}"
