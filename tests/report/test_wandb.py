"""podwatch's own W&B run. What needs W&B itself runs where it is installed (`make test-telling`), offline."""

import asyncio
import ctypes
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.event import Change, Notice, Topic
from podwatch.domain.finding import Severity
from podwatch.report import wandb
from podwatch.report.deliver_notices import NotSent, document_of
from podwatch.report.metrics import for_wandb
from podwatch.report.wandb import WandbPlan, WandbRun
from podwatch.system import procfs
from podwatch.system.clock import SystemClock
from tests.report import views
from tests.support.clock import AutoClock

pytestmark = pytest.mark.slow

HAVE_WANDB = importlib.util.find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not HAVE_WANDB, reason="wandb is not installed here: make test-telling")
ALERT = document_of(
    Notice(
        Topic.NEEDS_OPERATOR, Change.OPENED, Severity.CRITICAL, "disk-no-room", "31 GB are free", "disk-no-room", 1.7e9
    ),
    run_id="r1",
    host="pod",
)


def plan(tmp_path: Path, **changes: Any) -> WandbPlan:
    given = {"python": sys.executable, "directory": tmp_path / "wandb", "run_id": "r1", "project": "p"}
    return WandbPlan(**{**given, "training": {"WANDB_MODE": "offline"}, **changes})


def python_that(tmp_path: Path, script: str) -> str:
    """Stands where a Python would, and answers as it likes."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


WITHOUT_RIGHTS = """
import asyncio, ctypes, os, sys
from podwatch.report.deliver_notices import CommandChannel, NotSent
from podwatch.report.wandb import WandbRun, WandbPlan
from podwatch.system.clock import SystemClock
from podwatch.domain.event import Severity
from pathlib import Path
user = "root" if os.geteuid() else "nobody"
plan = WandbPlan(sys.executable, Path(sys.argv[1]), "r1", "p", user=user)
for channel in (CommandChannel(("/bin/true",), 20.0, user=user), WandbRun(plan, SystemClock())):
    try:
        asyncio.run(channel.send({"severity": "info", "title": "t", "text": "t"}))
    except NotSent as error:
        print(user in str(error) and "CAP_SETUID" in str(error), "Errno" in str(error))
"""


def test_a_user_that_the_system_forbids_is_named_with_the_fix(tmp_path: Path) -> None:
    def drop() -> None:  # as podwatch's systemd unit does
        for capability in (6, 7):  # CAP_SETGID, CAP_SETUID
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)

    argv = [sys.executable, "-c", WITHOUT_RIGHTS, str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, preexec_fn=drop, check=False)
    assert done.stdout.split() == ["True", "False", "True", "False"], done.stderr


async def test_an_answer_that_is_nested_too_deep_is_an_end(tmp_path: Path) -> None:
    script = (
        """read x; printf '{"ok":true,"why":""}\\n'; read x; head -c 20000 /dev/zero | tr '\\0' '['; echo; sleep 30"""
    )
    run = WandbRun(plan(tmp_path, python=python_that(tmp_path, script)), SystemClock())
    with pytest.raises(NotSent):
        await run.send(ALERT)
    assert run.findings(0.0)
    await run.close(0.1)


def test_only_the_way_there_is_taken_from_the_training(tmp_path: Path) -> None:
    training = {
        "WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "https://w", "WANDB_RUN_ID": "theirs", "WANDB_RESUME": "must",
        "PRL_RUN_ID": "theirs", "WANDB_SHARED_RUN_ID": "theirs", "WANDB_RUN_GROUP": "g", "WANDB_DIR": "/app/outputs",
    }  # fmt: skip
    environ = {"WANDB_SWEEP_ID": "s", "B2_APPLICATION_KEY": "secret", "PATH": "/bin", "PYTHONPATH": "/x", "HOME": "/h"}
    made = plan(tmp_path, training=training).environment(environ)
    assert "theirs" not in made.values()
    assert {"WANDB_SWEEP_ID", "B2_APPLICATION_KEY", "WANDB_RESUME", "WANDB_RUN_GROUP", "PYTHONPATH"}.isdisjoint(made)
    assert made["WANDB_API_KEY"] == "k" * 40
    assert "/app/outputs" not in made.values(), "nothing of ours inside the trainer's directories"
    first = plan(tmp_path).first_order()["init"]
    assert first["dir"] == str(tmp_path / "wandb")
    assert (first["group"], first["job_type"], first["resume"]) == ("r1", "podwatch", "allow")
    assert "k" * 40 not in repr(plan(tmp_path, training=training))


def test_the_figures() -> None:
    found = for_wandb(views.healthy())
    assert not [n for n in for_wandb(views.blind()) if "gpu_memory" in n], "unknown is not 0"
    assert found["podwatch/restarts"] >= 0
    assert {"podwatch/step", "podwatch/disk_free_bytes", "podwatch/published_step"} <= found.keys()
    assert found["podwatch/gpu_memory_used_bytes/0"] == 71 * views.GIB
    assert all(isinstance(v, float) and name.startswith("podwatch/") for name, v in found.items())
    assert len(found) < 60


async def test_a_python_without_wandb_says_so_and_is_not_tried_at_every_turn(tmp_path: Path) -> None:
    if HAVE_WANDB:
        pytest.skip("wandb is installed here")
    clock = AutoClock()
    run = WandbRun(plan(tmp_path), clock)
    await run.push({"podwatch/step": 1.0})
    (finding,) = run.findings(0.0)
    assert "No module named 'wandb'" in finding.summary
    assert finding.severity is Severity.WARNING
    began = time.monotonic()
    for _ in range(100):
        await run.push({"podwatch/step": 1.0})
    with pytest.raises(NotSent, match="No module named"):
        await run.send(ALERT)
    assert time.monotonic() - began < 10, "a hundred Pythons would take longer"
    assert run.pid is None


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 3", "its process ended"),
        ("echo Traceback >&2; echo 'ValueError: no' >&2; exit 1", "its process ended: ValueError: no"),
        ("echo not json; exec sleep 60", "its process ended"),
        ('echo \'{"ok": false, "why": "api_key not configured (no-tty)"}\'; exit 1', "api_key not configured"),
    ],
)
async def test_a_child_that_fails(tmp_path: Path, script: str, why: str) -> None:
    run = WandbRun(plan(tmp_path, python=python_that(tmp_path, script)), AutoClock())
    with pytest.raises(NotSent):
        await run.send(ALERT)
    assert why in run.findings(0.0)[0].summary
    assert run.pid is None


async def test_a_row_that_meets_the_end_of_an_idle_child_goes_to_the_next(tmp_path: Path) -> None:
    """The daemon notices the end of a child later than the child ends; such a row was lost, with a finding."""
    begun, rows = tmp_path / "begun", tmp_path / "rows"
    ok = 'echo \'{"ok": true, "why": "offline"}\''
    script = (
        f"echo begun >> {begun}; read init; {ok}; [ $(wc -l < {begun}) = 1 ] && read row && exit 0;\n"
        f'while read row; do echo "$row" >> {rows}; {ok}; done'
    )
    run = WandbRun(plan(tmp_path, python=python_that(tmp_path, script)), AutoClock())
    await run.push({"podwatch/step": 1.0})
    await run.send(ALERT)
    await run.close(20.0)
    assert (run.findings(0.0), len(begun.read_text().splitlines())) == ((), 2)
    assert [next(iter(json.loads(row))) for row in rows.read_text().splitlines()] == ["log", "alert"]


async def test_a_child_that_always_ends_unasked_is_not_tried_for_ever(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    script = f'echo begun >> {begun}; read init; echo \'{{"ok": true, "why": ""}}\'; read row; exit 0'
    run = WandbRun(plan(tmp_path, python=python_that(tmp_path, script)), AutoClock())
    await run.push({"podwatch/step": 1.0})
    assert "its process ended" in run.findings(0.0)[0].summary
    assert len(begun.read_text().splitlines()) == 2


async def test_a_child_that_does_not_answer_is_killed_with_its_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "INIT_SECONDS", 3.0)
    pids = tmp_path / "pids"
    run = WandbRun(plan(tmp_path, python=python_that(tmp_path, f"sleep 60 & echo $$ $! > {pids}; wait")), AutoClock())
    pushing = asyncio.create_task(run.push({"podwatch/step": 1.0}))
    while not (pids.exists() and pids.read_text().endswith("\n")):
        assert not pushing.done()
        await asyncio.sleep(0.01)
    await run.push({"podwatch/step": 2.0})
    assert not pushing.done(), "a row does not wait behind one that waits for W&B"
    await pushing
    began = time.monotonic()
    assert "no answer within" in run.findings(0.0)[0].summary
    for pid in map(int, pids.read_text().split()):
        while (found := procfs.read_stat(pid)) is not None and found.state not in "ZX":
            assert time.monotonic() - began < 10
            await asyncio.sleep(0.01)


# -- with W&B itself

READER = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2 as pb

def records(data, block=32768):
    # a head of 7 bytes, then LevelDB's log format
    assert data[:4] == b":W&B"
    at, parts = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at:at + 7])
        parts += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""

rows, alerts, run = [], [], {}
for data in records(open(sys.argv[1], "rb").read()):
    record = pb.Record()
    record.ParseFromString(data)
    kind = record.WhichOneof("record_type")
    if kind == "run":
        r = record.run
        run = {"id": r.run_id, "group": r.run_group, "job_type": r.job_type, "project": r.project}
        run["name"] = r.display_name
    elif kind == "history":
        rows.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item})
    elif kind == "alert":
        alerts.append([record.alert.title, record.alert.text, record.alert.level])
print(json.dumps({"run": run, "rows": rows, "alerts": alerts}))
"""


@needs_wandb
@pytest.mark.timeout(600)
async def test_an_offline_run_holds_rows_and_alerts(tmp_path: Path) -> None:
    run = WandbRun(plan(tmp_path), SystemClock())
    await run.push({"podwatch/step": 40.0, "podwatch/restarts": 2.0})
    assert (run.findings(0.0), run.where) == ((), "offline")
    await run.send(ALERT)
    await run.push({"podwatch/step": 41.0, "podwatch/restarts": 3.0})
    pid = run.pid
    assert pid is not None
    await run.close(20.0)
    assert procfs.read_stat(pid) is None or procfs.read_stat(pid).state in "ZX"  # type: ignore[union-attr]

    (file,) = (tmp_path / "wandb").rglob("run-podwatch-r1.wandb")
    assert file.parent.name.startswith("offline-run-")
    done = subprocess.run([sys.executable, "-c", READER, str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["run"] == {
        "id": "podwatch-r1", "group": "r1", "job_type": "podwatch", "project": "p", "name": "podwatch r1",
    }  # fmt: skip
    assert [(r["podwatch/step"], r["podwatch/restarts"]) for r in found["rows"]] == [(40.0, 2.0), (41.0, 3.0)]
    assert found["alerts"] == [["r1: disk-no-room", "31 GB are free\nDo: nothing", "ERROR"]]


@needs_wandb
@pytest.mark.timeout(600)
async def test_it_ends_when_its_daemon_is_killed_or_forgets_it(tmp_path: Path) -> None:
    forgotten = WandbRun(plan(tmp_path / "a", idle=1.0), SystemClock())
    await forgotten.push({"podwatch/step": 1.0})
    orphan = WandbRun(plan(tmp_path / "b"), SystemClock())
    await orphan.push({"podwatch/step": 1.0})
    assert orphan._process is not None
    assert orphan._process.stdin is not None
    pids = [forgotten.pid, orphan.pid]
    orphan._process.stdin.close()  # what a killed daemon leaves
    for pid in pids:
        end = time.monotonic() + 30
        while pid is not None and (found := procfs.read_stat(pid)) is not None and found.state not in "ZX":
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
    await forgotten.push({"podwatch/step": 2.0})
    assert forgotten.pid not in (None, pids[0]), "the next row starts another"
    await forgotten.close(20.0)
    await orphan.close()


@needs_wandb
@pytest.mark.timeout(300)
async def test_without_a_key_it_says_so_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = WandbRun(plan(tmp_path, training={"WANDB_BASE_URL": "http://127.0.0.1:9"}), SystemClock())
    with pytest.raises(NotSent):
        await run.send(ALERT)
    assert "key" in run.findings(0.0)[0].summary.lower(), run.why
    assert run.pid is None
