"""One run of a command, with real processes: what it does must end with it, and stay outside podwatch."""

import asyncio
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from podwatch.config.loading import load_text
from podwatch.config.settings import HookSettings
from podwatch.domain.errors import PodwatchError
from podwatch.hooks import child_main, start_child
from podwatch.system import procfs

pytestmark = pytest.mark.slow


def order(tmp_path: Path, *argv: str, timeout: float = 60.0, document: str = "{}\n") -> start_child.Order:
    env = {"PATH": os.environ["PATH"], "MINE": "1"}
    log, lock = str(tmp_path / "h.log"), str(tmp_path / "h.lock")
    return start_child.Order(
        argv, str(tmp_path), env, timeout, document, "checkpoint:5:x attempt 1", log, lock, grace=0.3
    )


def sh(tmp_path: Path, script: str, timeout: float = 60.0) -> start_child.Order:
    return order(tmp_path, "/bin/sh", "-c", script, timeout=timeout)


def run(one: start_child.Order) -> start_child.Result:
    return asyncio.run(start_child.run(one))


def living(path: Path) -> int:
    """The process whose id is in the file; 0 if it has ended."""
    pid = int(path.read_text())
    stat = procfs.read_stat(pid)
    return 0 if stat is None or stat.state in "ZX" else pid


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_input_environment_directory_output_and_exit_code(tmp_path: Path) -> None:
    script = "cat > got; pwd; echo $MINE$HOME; echo last >&2; exit 3"
    result = run(replace(sh(tmp_path, script), document=json.dumps({"step": 5}) + "\n"))
    assert (result.code, result.ok, result.timed_out, result.problem) == (3, False, False, "")
    assert json.loads((tmp_path / "got").read_text()) == {"step": 5}
    assert result.tail.splitlines() == [str(tmp_path), "1", "last"]
    assert result.why(60) == "exit code 3: last"
    log = tmp_path / "h.log"
    assert "checkpoint:5:x attempt 1: exit code 3 after" in log.read_text()
    assert "\nlast\n" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert run(sh(tmp_path, "true")).ok


def test_a_document_that_is_never_read_and_one_larger_than_a_pipe(tmp_path: Path) -> None:
    big = json.dumps({"message": "x" * 300_000}) + "\n"
    assert run(replace(sh(tmp_path, "true"), document=big)).ok
    assert run(replace(sh(tmp_path, "wc -c"), document=big)).tail.strip() == str(len(big))


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    missing = run(order(tmp_path, "/no/such/program"))
    assert missing.code is None
    assert missing.why(60) == "cannot start /no/such/program: No such file or directory"
    assert "No such file" in run(replace(sh(tmp_path, "true"), cwd="/no/such/directory")).why(60)


def test_the_time_limit_ends_everything_even_what_ignores_sigterm_and_left_the_group(tmp_path: Path) -> None:
    script = (
        "trap '' TERM; setsid sh -c \"trap '' TERM; echo \\$\\$ > far; sleep 600\" & "
        "sh -c 'echo $$ > near; sleep 600' & echo $$ > own; while :; do sleep 1; done"
    )
    result = run(sh(tmp_path, script, timeout=1.5))
    assert result.timed_out
    assert result.why(1.5) == "no end within 1.5 s"
    assert [living(tmp_path / name) for name in ("far", "near", "own")] == [0, 0, 0]


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    result = run(sh(tmp_path, "setsid sleep 600 & echo $! > left; echo done"))
    assert result.ok
    assert result.tail == "done\n"
    assert living(tmp_path / "left") == 0


def test_a_flood_is_bounded_here_and_in_the_log(tmp_path: Path) -> None:
    result = run(sh(tmp_path, "echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last"))
    assert result.ok
    assert result.tail.endswith("last\n")
    assert result.dropped > 25_000_000
    log = (tmp_path / "h.log").read_text()
    assert len(log) < child_main.HEAD_BYTES + 2 * child_main.TAIL_BYTES + 65536
    assert "first\n" in log
    assert "bytes of output dropped" in log


def test_the_log_is_rotated_and_one_older_file_kept(tmp_path: Path) -> None:
    for _ in range(5):
        run(sh(tmp_path, "head -c 500000 /dev/zero | tr '\\0' x"))
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("h.log*")}
    assert sorted(sizes) == ["h.log", "h.log.1"]
    assert max(sizes.values()) < child_main.LOG_BYTES + 600_000


def test_it_gives_way_to_everything_else(tmp_path: Path) -> None:
    result = run(sh(tmp_path, "nice; cat /proc/self/oom_score_adj; ps -o cls= -p $$ 2>/dev/null; true"))
    assert result.tail.split()[:2] == ["19", "1000"]


def test_cancelling_ends_the_command(tmp_path: Path) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(start_child.run(sh(tmp_path, "echo $$ > own; sleep 600")))
        while not (tmp_path / "own").exists() or not (tmp_path / "own").read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: living(tmp_path / "own") == 0)


def test_a_kill_of_podwatch_ends_it_and_the_next_run_waits_for_that(tmp_path: Path) -> None:
    one = asdict(sh(tmp_path, "trap '' TERM; echo $$ > own; sleep 600; true"))
    parent = subprocess.Popen(
        [sys.executable, "-c", "import sys,time,subprocess as s;"
         "p=s.Popen([sys.executable,'-m','podwatch.hooks.child_main'],stdin=s.PIPE,stdout=s.PIPE);"
         "p.stdin.write(sys.stdin.buffer.readline());p.stdin.flush();time.sleep(600)"],
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert parent.stdin is not None
    parent.stdin.write(json.dumps(one).encode() + b"\n")
    parent.stdin.flush()
    until(lambda: (tmp_path / "own").exists() and (tmp_path / "own").read_text())
    before = living(tmp_path / "own")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdin.close()
    result = run(sh(tmp_path, f"kill -0 {before} 2>/dev/null && echo both || echo alone"))
    assert result.tail == "alone\n", "never two runs of one hook at once"


FAR = "setsid sh -c 'echo $$ > far; sleep 600' & echo $PPID > worker; sleep 600; true"


@pytest.mark.parametrize("detached", ["setsid", "setsid env -i", "setsid setsid -f env -i"])
def test_a_killed_worker_leaves_nothing(tmp_path: Path, detached: str) -> None:
    """The out-of-memory killer takes it, say: what it started in a session of its own is ended, even if it has dropped
    its environment."""

    async def killed() -> start_child.Result:
        task = asyncio.create_task(start_child.run(sh(tmp_path, FAR.replace("setsid", detached))))
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("far", "worker")):
            await asyncio.sleep(0.02)
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)
        return await task

    result = asyncio.run(killed())
    assert result.problem == "its worker process ended without a result"
    assert living(tmp_path / "far") == 0


def test_a_kill_of_what_waits_for_the_worker_changes_nothing(tmp_path: Path) -> None:
    async def killed() -> start_child.Result:
        script = "echo $PPID > worker; while [ ! -e go ]; do sleep 0.05; done; setsid sleep 600 & echo $! > far"
        task = asyncio.create_task(start_child.run(sh(tmp_path, script)))
        while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():
            await asyncio.sleep(0.02)
        worker = procfs.read_stat(int((tmp_path / "worker").read_text()))
        assert worker is not None
        assert worker.parent_pid != os.getpid()
        os.kill(worker.parent_pid, signal.SIGKILL)
        (tmp_path / "go").touch()
        return await task

    assert asyncio.run(killed()).ok
    assert living(tmp_path / "far") == 0


def test_a_worker_that_does_not_end_in_time_is_killed_and_leaves_nothing(tmp_path: Path) -> None:
    async def stopped() -> None:
        task = asyncio.create_task(start_child.run(sh(tmp_path, FAR)))
        while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in ("far", "worker")):
            await asyncio.sleep(0.02)
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGSTOP)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert living(tmp_path / "far") == 0


def test_the_store_key_and_podwatchs_own_settings_do_not_reach_it(tmp_path: Path) -> None:
    env_file = tmp_path / "hook.env"
    env_file.write_text("EVAL_TOKEN=hush-4711-token\n")
    env_file.chmod(0o600)
    text = (
        f'run_id = "r1"\n[trainer]\noutput_dir = "{tmp_path}/out"\n[[hooks]]\nname = "h"\non = ["checkpoint"]\n'
        f'command = ["env"]\nenv_file = "{env_file}"\n'
    )
    settings = load_text(text, None, environ={}).settings
    environ = {"PATH": os.environ["PATH"], "B2_APPLICATION_KEY": "store-key", "PODWATCH_AWS_SECRET_ACCESS_KEY": "k2",
               "NOTIFY_SOCKET": "/run/x", "PODWATCH_SYNC__STORE": "b2://b", "WANDB_API_KEY": "theirs"}  # fmt: skip
    made = start_child.order_for(
        settings.hooks[0], settings, environ, own={"PODWATCH_STEP": "5"}, document={}, title="t", state=None
    )
    assert made.cwd == str(tmp_path)
    shown = run(made)
    names = {line.partition("=")[0] for line in shown.tail.splitlines()}
    assert not names & {"B2_APPLICATION_KEY", "PODWATCH_AWS_SECRET_ACCESS_KEY", "NOTIFY_SOCKET", "PODWATCH_SYNC__STORE"}
    assert {"WANDB_API_KEY", "EVAL_TOKEN", "PODWATCH_STEP"} <= names
    failed = start_child.Result(1, tail="sent hush-4711-token away\n")
    assert "hush" not in failed.why(1.0)


def test_it_gets_the_environment_of_training_then_its_own(tmp_path: Path) -> None:
    for name, lines in (
        (
            "train.env",
            "HF_TOKEN=hf-4711-token\nBOTH=training\nB2_APPLICATION_KEY=store-key\nPODWATCH_SYNC__STORE=b2://b\n",
        ),
        ("hook.env", "BOTH=hook\n"),
    ):
        (tmp_path / name).write_text(lines)
        (tmp_path / name).chmod(0o600)
    text = (
        f'run_id = "r1"\n[trainer]\noutput_dir = "{tmp_path}/out"\nenv_file = "{tmp_path}/train.env"\n'
        'env = { CUDA_VISIBLE_DEVICES = "0,1", BOTH = "env" }\n'
        f'[[hooks]]\nname = "h"\non = ["checkpoint"]\ncommand = ["env"]\nenv_file = "{tmp_path}/hook.env"\n'
        '[[hooks]]\nname = "c"\non = ["check"]\ncommand = ["env"]\n'
        '[evaluation]\ncommand = ["env"]\n'
    )
    settings = load_text(text, None, environ={}).settings

    def shown(child: HookSettings, **own: str) -> dict[str, str]:
        environ = {"PATH": os.environ["PATH"], "HOME": "/root", "BOTH": "podwatch"}
        made = start_child.order_for(child, settings, environ, own=own, document={}, title="t", state=None)
        return dict(line.split("=", 1) for line in run(made).tail.splitlines())

    hook = shown(settings.hooks[0])
    assert (hook["HF_TOKEN"], hook["CUDA_VISIBLE_DEVICES"], hook["BOTH"]) == ("hf-4711-token", "0,1", "hook")
    assert hook["HOME"] == "/root"
    assert not hook.keys() & {"B2_APPLICATION_KEY", "PODWATCH_SYNC__STORE"}, "podwatch's own"
    assert shown(settings.hooks[1])["BOTH"] == "training"
    evaluation = shown(settings.evaluation.as_hook(), CUDA_VISIBLE_DEVICES="")
    assert (evaluation["HF_TOKEN"], evaluation["CUDA_VISIBLE_DEVICES"]) == ("hf-4711-token", "")


def test_what_its_user_cannot_read_is_a_problem() -> None:
    """podwatch itself, as root, sees a script that another user cannot reach."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        place.chmod(0o755)
        script, program = place / "in" / "convert.py", place / "in" / "convert"
        script.parent.mkdir(mode=0o755)
        for path in (script, program):
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)

        def problem(*command: str) -> str:
            text = (
                f'run_id = "r1"\n[trainer]\noutput_dir = "{place}/out"\n[[hooks]]\nname = "h"\non = ["checkpoint"]\n'
                f'command = {json.dumps(command)}\ncwd = "/"\nuser = "nobody"\n'
            )
            settings = load_text(text, None, environ={}).settings
            return start_child.problem_of(settings.hooks[0], settings, {"PATH": "/usr/bin:/bin"})[0]

        shell = ("/bin/sh", str(script))
        assert (problem(*shell), problem(str(program))) == ("", "")
        script.parent.chmod(0o700)
        said = ": permission denied"
        assert problem(*shell) == f"user nobody cannot read {script}{said}"
        assert problem(str(program)) == f"user nobody cannot execute {program}{said}"
        script.parent.chmod(0o711)
        assert problem(*shell) == "", "a directory need not be readable"
        script.chmod(0o600)
        assert problem(*shell) == f"user nobody cannot read {script}{said}"
        os.chown(script, 65534, -1)
        if pwd.getpwnam("nobody").pw_uid == 65534:
            assert problem(*shell) == ""
    finally:
        shutil.rmtree(place)


def test_an_unusable_env_file_or_user_is_an_error_with_its_fix(tmp_path: Path) -> None:
    text = f'run_id = "r1"\n[trainer]\noutput_dir = "{tmp_path}/out"\n[[hooks]]\nname = "h"\non = ["checkpoint"]\n'
    for more, words in (
        (f'command = ["env"]\nenv_file = "{tmp_path}/none"\n', "cannot read the environment file"),
        ('command = ["env"]\nuser = "no-such-user"\n', "not found"),
    ):
        settings = load_text(text + more, None, environ={}).settings
        with pytest.raises(PodwatchError, match=words):
            start_child.order_for(settings.hooks[0], settings, {}, own={}, document={}, title="t", state=None)
