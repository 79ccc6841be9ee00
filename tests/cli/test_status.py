"""``podwatch status`` as a real process against a real socket, and without one."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from podwatch.report.status import build_status
from podwatch.system.endpoint import Endpoint, own_endpoint, write_document, write_endpoint
from tests.report import views
from tests.support.pod import eventually
from tests.support.ptys import Screen, terminal


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("running", 0, "TRAINING IS RUNNING at step 85"),
        ("not-backed-up", 1, "NOT BACKED UP"),
        ("dead-recovering", 2, "TRAINING IS DOWN"),
        ("gave-up", 2, "GAVE UP"),
        ("blind", 3, "STATE OF TRAINING UNKNOWN"),
    ],
)
def test_exit_code_and_first_line(machine, state, code, words):
    machine.daemon(state)
    result = machine.podwatch("status")
    assert result.returncode == code, result.stderr
    assert words in "".join(result.stdout.splitlines(keepends=True)[:2])
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_json_is_the_document(guarded):
    result = guarded.podwatch("status", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 0
    assert document["training"]["step"] == 85


def test_bars_are_ascii_where_the_encoding_has_no_others(guarded):
    guarded.env["PYTHONIOENCODING"] = "utf-8"
    assert "\u2588\u2588" in guarded.podwatch("status").stdout
    guarded.env["PYTHONIOENCODING"] = "ascii"
    result = guarded.podwatch("status")
    assert result.returncode == 0, result.stderr
    assert "##" in result.stdout


def test_plugin(guarded):
    result = guarded.podwatch("status", "--plugin")
    assert result.stdout.startswith("PODWATCH OK - ")
    assert result.stdout.count("\n") == 1


def test_plugin_prints_its_own_errors_on_stdout(machine):
    """Monitoring reads stdout; the code alone does not say why."""
    result = machine.podwatch("status", "--plugin", "-c", "/nowhere.toml")
    assert result.returncode == 3
    assert result.stdout.startswith("PODWATCH UNKNOWN - cannot read the configuration")
    assert result.stdout.count("\n") == 1


def test_the_digest_now(guarded):
    shown = guarded.podwatch("status", "--digest")
    assert shown.returncode == 0
    assert "step 85" in shown.stdout.splitlines()[0]
    assert "\nDisk: " in shown.stdout
    assert guarded.podwatch("status", "--digest", "--json").returncode == 3


def test_a_digest_of_what_does_not_run_is_the_verdict_alone(machine):
    shown = machine.podwatch("status", "--digest")
    assert (shown.returncode, shown.stdout.startswith("PODWATCH IS NOT RUNNING")) == (3, True)


def test_no_daemon_at_all(machine):
    result = machine.podwatch("status")
    assert result.returncode == 3
    assert result.stdout.startswith("PODWATCH IS NOT RUNNING")
    assert str(machine.runtime) in "".join(result.stdout.split())  # a long path is wrapped
    assert "podwatch run" in result.stdout


def test_http_is_the_way_when_the_socket_is_closed_to_us(machine):
    machine.daemon("running")
    shutil.rmtree(machine.runtime / "bs4-qwen3-8b" / "control")
    result = machine.podwatch("status")
    assert result.returncode == 0
    assert "at step 85" in result.stdout


def test_a_killed_daemon_leaves_the_last_snapshot(machine):
    process = machine.daemon("running")
    process.kill()
    process.wait()
    result = machine.podwatch("status", "--json")
    document = json.loads(result.stdout)
    assert result.returncode == 3
    assert (document["running"], document["overall"]) == (False, "unknown")
    assert document["reasons"][0]["kind"] == "podwatch-died"
    assert document["training"]["step"] == 85
    assert document["training_alive"] is False
    text = machine.podwatch("status").stdout
    assert text.startswith("PODWATCH IS NOT RUNNING and TRAINING IS NOT RUNNING")
    assert "old (from" in text


def test_a_daemon_that_left_on_purpose_says_since_when(machine):
    run = machine.runtime / "r"
    run.mkdir()
    write_endpoint(run, Endpoint("r", 1, stopped_wall=time.time() - 300, config_path="/etc/podwatch/r.toml"))
    result = machine.podwatch("status")
    assert result.returncode == 3
    assert "stopped 5 min ago" in result.stdout
    assert "podwatch run -c /etc/podwatch/r.toml" in result.stdout


def test_training_that_goes_on_unguarded_is_said_first(machine):
    run = machine.runtime / "r"
    run.mkdir()
    write_endpoint(run, Endpoint("r", 1, stopped_wall=time.time() - 300))
    document = build_status(views.healthy())
    me = own_endpoint("r", started_wall=0.0)
    document["training"].update(pid=me.pid, start_ticks=me.start_ticks)
    write_document(run / "status.json", document)
    assert machine.podwatch("status").stdout.startswith("PODWATCH IS STOPPED: training continues UNGUARDED")


def test_a_daemon_that_hangs_is_not_ok(machine):
    process = machine.daemon("running")
    import os
    import signal

    os.kill(process.pid, signal.SIGSTOP)
    result = machine.podwatch("status")
    os.kill(process.pid, signal.SIGCONT)
    assert result.returncode == 3
    assert result.stdout.startswith("PODWATCH DOES NOT ANSWER")


def test_several_runs_need_a_name(machine):
    for name in ("one", "two"):
        (machine.runtime / name).mkdir()
        write_endpoint(machine.runtime / name, own_endpoint(name, started_wall=0.0))
    result = machine.podwatch("status")
    assert result.returncode == 3
    assert "choose one with --run: one, two" in result.stderr
    assert "run 'three' not found" in machine.podwatch("status", "--run", "three").stderr
    assert "DOES NOT ANSWER" in machine.podwatch("--run", "two", "status").stdout


def test_a_broken_endpoint_file_is_not_a_daemon(machine):
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"run_id": 5, "pid": "x"}'), ("d", "")):
        (machine.runtime / name).mkdir()
        (machine.runtime / name / "endpoint.json").write_text(text)
    assert machine.podwatch("status").returncode == 3


def test_an_error_of_the_command_itself_is_unknown(guarded):
    """Monitoring knows 0 to 3 only."""
    result = guarded.podwatch("status", "--json", "--plugin")
    assert (result.returncode, "cannot be used together" in result.stderr) == (3, True)
    result = guarded.podwatch("status", "--nonsense")
    assert (result.returncode, "No such option" in result.stderr) == (3, True)
    result = guarded.podwatch("-c", "/nonexistent.toml", "status")
    assert (result.returncode, "/nonexistent.toml" in result.stderr) == (3, True)
    assert guarded.podwatch("status", "--help").returncode == 0


HEAVY = {"pydantic", "pydantic_settings", "rich", "structlog", "b2sdk", "starlette", "uvicorn", "prometheus_client",
         "psutil", "pynvml", "apscheduler", "watchdog", "stamina", "sqlite3", "asyncio"}  # fmt: skip


def test_status_imports_nothing_heavier_than_click(guarded):
    code = (
        "import sys; sys.argv = ['podwatch', 'status']\n"
        "from podwatch.cli import main\n"
        "try: main()\n"
        "except SystemExit as e: assert e.code == 0, e.code\n"
        "print('LOADED', *sorted({m.split('.')[0] for m in sys.modules}))\n"
        "print('ROOMS', *sorted(m for m in sys.modules if m.startswith('podwatch.')))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=guarded.env, cwd=guarded.directory / "cwd"
    )
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split("LOADED ")[1].splitlines()[0].split())
    assert not loaded & HEAVY
    rooms = result.stdout.split("ROOMS ")[1].split()
    assert {r.split(".")[1] for r in rooms} <= {"cli", "config", "domain", "report", "system"}


PAINTED = "\x1b[H"
SLOW = pytest.mark.slow
WATCH = [sys.executable, "-m", "podwatch", "status", "--watch"]


def looks_often(machine) -> dict[str, str]:
    """The environment of `podwatch status --watch` that looks again ten times as often."""
    file = machine.directory / "test-times.toml"
    file.write_text('[times]\n"status.watch" = "0.2s"\n')
    return machine.env | {"PODWATCH_TEST_TIMES": str(file)}


@pytest.mark.parametrize("size", [pytest.param((120, 40), marks=SLOW), (80, 24), pytest.param((50, 10), marks=SLOW)])
def test_watch_keeps_the_verdict_in_view(machine, size):
    machine.daemon("gave-up")
    with terminal(WATCH, str(machine.directory), size=size, environ=looks_often(machine) | {"NO_COLOR": "1"}) as window:
        window.expect(PAINTED)
        for _ in range(2):  # what was painted is over when the next one begins
            screen = Screen(*size)
            screen.write(window.read(PAINTED).removesuffix(PAINTED))
            assert screen.lines[0].startswith("TRAINING IS DOWN"), screen.lines
            assert "GAVE UP" in " ".join(screen.lines)
            assert ("more lines hidden" in screen.lines[-2]) == (size[1] < 40), screen.lines
            assert "Ctrl-C ends" in screen.lines[-1] or size[1] == 40, screen.lines
        window.resize(50, 10)
        smaller, painted = Screen(50, 10), " " * 80
        while max(map(len, painted.splitlines())) > 50 + len("\x1b[K"):  # painted before the change
            painted = window.read(PAINTED).removesuffix(PAINTED)
        smaller.write(painted)
        assert smaller.lines[0].startswith("TRAINING IS DOWN"), smaller.lines


def test_watch_into_a_file_is_not_cut(machine, tmp_path):
    machine.daemon("gave-up")
    whole = machine.podwatch("status").stdout
    out = tmp_path / "out"
    with (
        out.open("w") as stream,
        subprocess.Popen(WATCH, stdout=stream, env=looks_often(machine), cwd=tmp_path) as process,
    ):
        eventually(lambda: out.read_text().count("NEEDS ATTENTION") >= 2)
        process.terminate()
    assert out.read_text().count("\n") >= 2 * whole.count("\n")
    assert "hidden" not in out.read_text()


def old(machine, name, *, days):
    """A run whose podwatch left so long ago."""
    run = machine.runtime / name
    run.mkdir()
    left = time.time() - days * 86400
    write_endpoint(run, Endpoint(name, 1, stopped_wall=left))
    document = build_status(views.healthy())
    document["training"].update(pid=None)
    write_document(run / "status.json", document)
    for path in run.iterdir():
        os.utime(path, (left, left))


def test_where_none_runs_the_last_one_is_meant(machine):
    old(machine, "last-week", days=7)
    old(machine, "last-quarter", days=60)
    assert "stopped 7 d ago" in machine.podwatch("status").stdout
    assert "known runs: last-quarter, last-week" in machine.podwatch("status", "--run", "none").stderr
    assert "stopped 60 d ago" in machine.podwatch("status", "--run", "last-quarter").stdout
    machine.daemon("running")
    assert "at step 85" in machine.podwatch("status").stdout, "one that runs comes before all that ended"


def test_the_run_of_the_configuration_here_is_meant_among_several(machine):
    for name in ("one", "two"):
        (machine.runtime / name).mkdir()
        write_endpoint(machine.runtime / name, own_endpoint(name, started_wall=0.0))
    here = machine.directory / "cwd" / "podwatch.toml"
    here.write_text('run_id = "two"\n')
    here.chmod(0o600)
    assert json.loads(machine.podwatch("status", "--json").stdout)["run_id"] == "two"
    assert json.loads(machine.podwatch("status", "--run", "one", "--json").stdout)["run_id"] == "one"
    here.write_text('run_id = "elsewhere"\n')
    assert machine.podwatch("status").returncode == 3, "a file that names no run of this machine says nothing"
    old(machine, "three", days=1)
    here.write_text('run_id = "three"\n')
    assert "stopped 24 h ago" in machine.podwatch("status").stdout, "the run here, also where another one lives"
