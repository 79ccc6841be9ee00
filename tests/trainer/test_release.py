"""Letting a supervisor go while the last process of its tree is half gone."""

import sys
import time

import pytest

from podwatch.system import procfs
from tests.support.pod import Pod, eventually

HALF_GONE = """
import ctypes, os, threading, time
threading.Thread(target=lambda: (time.sleep(1.2), os._exit(0)), daemon=True).start()
open("ready", "w").write(str(os.getpid()))
while not os.path.exists("go"):
    time.sleep(0.01)
ctypes.CDLL(None).syscall(60, 0)
"""
"""Its first thread ends, another one lives on: /proc says zombie, and its parent cannot reap it yet."""


async def test_a_process_that_is_half_gone_is_waited_for(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podwatch.trainer.trainer_handle._EXIT_RECORD_WAIT", 60.0)
    launcher = pod.launcher()
    (pod.output.parent / "half.py").write_text(HALF_GONE)
    handle = await launcher.start(pod.script(f"{sys.executable} half.py & while ! test -s ready; do :; done; exit 3"))
    ready = pod.output.parent / "ready"
    eventually(lambda: ready.exists() and ready.read_text())
    eventually((pod.directory / f"exit-{pod.start_id()}.json").exists)
    (pod.output.parent / "go").touch()
    eventually(lambda: (s := procfs.read_stat(int(ready.read_text()))) is None or s.state in "ZX")
    began = time.monotonic()
    await handle.stop(grace=2, save_grace=2, saving=lambda: False)
    await handle.release()
    took = time.monotonic() - began
    assert took < 30, f"let go {took:.1f} s later: the supervisor had to be killed"
    status = await handle.exit_status()
    assert status is not None
    assert status.code == 3
    assert (pod.directory / "record.last.json").exists()
