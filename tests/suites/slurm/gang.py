"""A torchrun over all nodes of the lab as a Slurm job: ``sbatch examples/engines/slurm-nodes.sbatch``, with podwatch on
each node, one output directory that all share, and the same ranks once more that nobody touches."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podwatch.simulation.pod import free_port
from tests.suites.slurm.lab import Lab
from tests.suites.slurm.training import GONE, PATIENCE, SlurmTraining
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.nvml import NvmlWorld, build_nvml

EXAMPLE = Path(__file__).parents[3] / "examples" / "engines" / "slurm-nodes.sbatch"
PROGRAM = Path(__file__).with_name("programs") / "gang_train.py"
STEPS, INTERVAL = 48, 8
TORCHRUN = str(Path(sys.executable).parent / "torchrun")


class UntouchedRanks:
    """All ranks on this machine, without podwatch."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._output, control = directory / "reference", directory / "reference-control"
        self._output.mkdir()
        control.mkdir()
        environ = {**os.environ, "CHAOS_CONTROL": str(control), "OMP_NUM_THREADS": "1"}
        environ = {name: value for name, value in environ.items() if not name.startswith("SLURM")}
        with (directory / "reference.log").open("wb") as log:
            self._process = subprocess.Popen(
                [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM), *arguments(self._output)],
                cwd=directory, stdout=log, stderr=log, env=environ, start_new_session=True,
            )  # fmt: skip

    def weights(self, seconds: float) -> Path:
        assert self._process.wait(seconds) == 0, "the run that nobody touched failed by itself"
        return self._output / "final.pt"

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def arguments(output: Path) -> list[str]:
    return ["--output_dir", str(output), "--steps", str(STEPS), "--interval", str(INTERVAL)]


class GangTraining:
    """One run. ``output`` is on the disk that all nodes share, or with ``own_disks`` on each node's own, as the state
    directory is."""

    def __init__(self, lab: Lab, root: Path, name: str, *, own_disks: bool = False) -> None:
        self.lab, self.run_id, self.own_disks = lab, name, own_disks
        self.directory = lab.root / "jobs" / name
        self.control = self.directory / "control"
        self.control.mkdir(parents=True)
        (self.control / "slow").touch()
        self.output = (lab.root / "disk" / name if own_disks else self.directory) / "outputs"
        self.store = B2Server(root / "b2").start()
        self.reference = UntouchedRanks(root, len(lab.nodes))
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{lab.environ['PATH']}",
            "B2_ENVIRONMENT": self.store.url, "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY,
            "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "CHAOS_CONTROL": str(self.control),
        }  # fmt: skip
        self.configure()

    def configure(self) -> None:
        port = free_port()
        command = [
            "sh", "-c",
            f'exec {TORCHRUN} --nnodes="$PODWATCH_NODE_COUNT" --node-rank="$PODWATCH_NODE_RANK" --nproc-per-node=1'
            f' --max-restarts=0 --master-addr=127.0.0.1 --master-port={port} {PROGRAM} "$@"',
            "torchrun", *arguments(self.output),
        ]  # fmt: skip
        (self.directory / "podwatch.toml").write_text(f"""
run_id = "{self.run_id}"
state_dir = "{self.lab.root}/disk/{self.run_id}/state"
[trainer]
layout = "dcp"
output_dir = "{self.output}"
cwd = "{self.directory}"
command = {json.dumps(command)}
resume_args = ["--resume", "{{checkpoint}}"]
max_steps = {STEPS}
stop_grace = "2s"
save_grace = "2s"
[gpu]
poll = "0.5s"
[recovery]
end_grace = "15s"
[checkpoints]
rescan = "0.5s"
settle = "0.3s"
settle_weak = "1s"
[nodes]
silence = "60s"
{self._nodes()}
[sync]
store = "b2://{BUCKET}"
part_size = "5MB"
heartbeat = "5s"
holder_patience = "15s"
claim_wait = "1s"
[disk]
prune_above = "99.5%"
prune_to = "99%"
[http]
port = 0
""")

    @property
    def final(self) -> Path:
        """The weights at the end, as this machine sees them."""
        at_home = self.lab.nodes["n1"].disk / self.run_id / "outputs"  # a node that was booted again has a new disk
        return (at_home if self.own_disks else self.output) / "final.pt"

    def _nodes(self) -> str:
        return f'disks = "local"\ndirectory = "{self.directory}/reports"' if self.own_disks else ""

    def with_gpus(self) -> dict[str, NvmlWorld]:
        """One busy GPU on each node, as NVML shows it, and a hang that counts after 10 s."""
        inside = self.lab.root / "disk" / "gpus"
        worlds = {name: NvmlWorld(node.disk / inside.name) for name, node in self.lab.nodes.items()}
        for world in worlds.values():
            world.set_load(0, utilization=80)
        library = build_nvml(self.directory / "lib")
        self.environ |= {**NvmlWorld.environment(worlds["n1"], library), "NVML_STANDIN": str(inside)}
        with (self.directory / "podwatch.toml").open("a") as out:
            out.write('[hang]\nfloor = "10s"\nagree = "2s"\n')
        return worlds

    # -- the job

    def submit(self, *arguments: str) -> int:
        where = [f"--chdir={self.directory}", f"--output={self.directory}/%j.out", f"--nodes={len(self.lab.nodes)}"]
        return self.lab.submit(*where, *arguments, str(EXAMPLE), environ=self.environ)

    def said(self, job: int) -> str:
        try:
            return (self.directory / f"{job}.out").read_text(errors="replace")
        except OSError:
            return ""

    def wait(self, condition: Callable[[], Any], what: str, job: int, seconds: float = PATIENCE) -> Any:
        def met() -> Any:
            value = condition()
            assert value or self.lab.state(job) not in GONE or condition(), "the job is over"
            return value

        try:
            return self.lab.wait(met, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}\n--- the job\n{self.said(job)[-9000:]}") from None

    def wait_completed(self, job: int) -> None:
        self.wait(lambda: self.lab.state(job) == "COMPLETED", "the job completes", job)

    def lives(self, node: str) -> list[dict[str, Any]]:
        """Ranks that began on this node, oldest first."""
        try:
            lines = (self.control / f"lives-{node}.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines]

    # -- the store

    def verdict(self) -> dict[str, Any]:
        """What the store keeps for the next attempt."""
        return self._newest("verdict.json")

    stored = SlurmTraining.stored
    heartbeat = SlurmTraining.heartbeat
    _newest = SlurmTraining._newest
    podwatch = SlurmTraining.podwatch
    quick = SlurmTraining.quick

    def wait_stored(self, step: int, job: int) -> None:
        self.wait(lambda: self.stored() >= step, f"step {step} is in the store", job)
        assert self.stored() < STEPS, "the run ended before anything happened to it"

    # -- the end

    def finished_well(self, job: int, root: Path) -> None:
        self.lab.wait(self.lab.idle, 30, "nothing is left on the nodes")
        assert self.stored() == STEPS, f"the job ended before its final checkpoint was stored\n{self.said(job)[-4000:]}"
        assert self.lab.job(job)["ExitCode"] == "0:0"
        assert not self.store.violations()
        import torch

        want = torch.load(self.reference.weights(PATIENCE), weights_only=True)
        got = torch.load(self.final, weights_only=True)
        assert want.keys() == got.keys()
        assert all(torch.equal(want[k], got[k]) for k in want), "other weights than an uninterrupted run's"
        restored = root / "restored"
        self.podwatch("restore", "--to", str(restored))
        (metadata,) = restored.rglob(".metadata")
        names = {path.name for path in metadata.parent.glob("*.distcp")}
        assert {f"__{rank}_0.distcp" for rank in range(len(self.lab.nodes))} <= names, (
            f"the shard of a rank is missing in the store: {names}"
        )

    def close(self) -> None:
        self.reference.close()
        self.store.stop()
