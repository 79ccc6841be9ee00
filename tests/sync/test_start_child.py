"""The upload's process: never left over, and quick to start."""

import subprocess
import sys
from pathlib import Path

import psutil

PARENT = """
import asyncio, sys
from podwatch.sync.upload.child_job import UploadJob
from podwatch.sync.upload.start_child import Upload
job = UploadJob(
    step=1, save_id="s", store=sys.argv[1], writer_id="w", part_size=1, connections=1, lock="", roots={}, files=()
)
async def main():
    child = await Upload(job)._start()
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_it_does_not_outlive_podwatch(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, f"file://{tmp_path}"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=60)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_the_process_loads_nothing_that_only_the_daemon_needs() -> None:
    """It is started for every checkpoint, mostly with nice 15: beside busy cores each module takes its time."""
    needless = ("podwatch.config.settings", "podwatch.checkpoints", "podwatch.sync.upload.start_child", "pydantic")
    code = f"import sys, podwatch.sync.upload.child_main\nprint([name for name in {needless!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
