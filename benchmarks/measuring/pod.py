"""A real daemon with 8 GPUs (the NVML stand-in), a trainer of 20 idle processes, and 10 step directories; on a disk
that counts as empty, whatever this machine's is, because a full one is no idle pod.
"""

import json
import os
import sys
from pathlib import Path
from types import TracebackType

from benchmarks.measuring import ROOT
from tests.support.b2server import B2Server
from tests.support.daemon import DaemonProcess
from tests.support.nvml import GIB, NvmlWorld, build_nvml

TRAINER = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from tests.support.checkpoints import broadcast_operations, finish, write_prime_rl_step
out = Path(sys.argv[1])
for step in range(10, 110, 10):
    write_prime_rl_step(out, step, "A")
for _ in range(18):
    if os.fork() == 0:
        while True:
            time.sleep(3600)
step = 110
while True:
    finish(broadcast_operations(out / "run_default" / "broadcasts" / f"step_{{step}}"))
    print(time.strftime("%H:%M:%S"), f"SUCCESS Step {{step}} | Time: 20.0s | Loss: 0.5", flush=True)
    step += 1
    time.sleep(20)
"""


class Pod:
    """``with Pod(directory) as pod``: the daemon is up and training runs."""

    def __init__(self, directory: Path, store: B2Server | None = None, *, poll: str = "2s") -> None:
        self._world = NvmlWorld(directory / "world", devices=8)
        library = build_nvml(directory)
        output = directory / "work" / "outputs"
        output.parent.mkdir(parents=True)
        self.output = output
        program = directory / "trainer.py"
        program.write_text(TRAINER)
        command = [sys.executable, "-S", str(program), str(output)]
        config = f"""
run_id = "bench-{os.getpid()}"
state_dir = {json.dumps(str(directory / "state"))}
[trainer]
layout = "prime-rl"
output_dir = {json.dumps(str(output))}
cwd = {json.dumps(str(output.parent))}
command = {json.dumps(command)}
[gpu]
inference = [0, 1, 2, 3]
trainer = [4, 5, 6, 7]
poll = {json.dumps(poll)}
[disk]
prune_above = "99%"
prune_to = "98%"
[http]
port = 0
[log]
format = "json"
"""
        environ = self._world.environment(library)
        if store is not None:
            config += f'[sync]\nstore = "b2://{store.bucket}"\n'
            names = ("B2_APPLICATION_KEY_ID", "B2_APPLICATION_KEY", "B2_ENVIRONMENT")
            environ |= {name: store.environment()[name] for name in names}
        self.daemon = DaemonProcess(directory, config, environ)
        self.environ, self.config = self.daemon.environ, self.daemon.config

    @property
    def pid(self) -> int:
        assert self.daemon.process is not None
        return self.daemon.process.pid

    @property
    def url(self) -> str:
        """``http://host:port`` of its page."""
        return str(json.loads(next(self.daemon.runtime.glob("*/endpoint.json")).read_text())["http_url"])

    @property
    def turns(self) -> int:
        """Of the sensing loop, so far."""
        document = self.daemon.wait_for(self.daemon.status, 30, "status answers")
        return int(document["counters"]["turns"])

    def __enter__(self) -> "Pod":
        self.daemon.start()
        stable = self.output / "run_default" / "broadcasts" / "step_110" / "STABLE"
        try:
            self.daemon.wait_for(self.daemon.status, 60, "status answers")
            self.daemon.wait_for(stable.exists, 60, "the trainer trains")
            for index in range(8):
                self._world.set_memory(index, 60 * GIB)
                self._world.set_load(index, utilization=80)
        except BaseException:
            self.daemon.end_training()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.daemon.end_training()
