"""A torchrun over all nodes of the lab as a Slurm job: ``sbatch examples/engines/slurm-nodes.sbatch``, with podwatch on
each node, one output directory that all share, and the same ranks once more that nobody touches."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.suites.slurm.lab import Lab
from tests.suites.slurm.training import GONE, PATIENCE, SlurmTraining, ends
from tests.support import own_times
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server
from tests.support.nvml import GIB, NvmlWorld, build_nvml
from tests.support.ports import free_port

EXAMPLE = Path(__file__).parents[3] / "examples" / "engines" / "slurm-nodes.sbatch"
PROGRAM = Path(__file__).with_name("programs") / "gang_train.py"
ENGINE = PROGRAM.with_name("engine.py")
STEPS, INTERVAL = 48, 8
TORCHRUN = str(Path(sys.executable).parent / "torchrun")


class UntouchedRanks:
    """All ranks on this machine, without podwatch, and without torchrun: another process can take the port that it
    chose before it listens there."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self._output, control = directory / "reference", directory / "reference-control"
        self._output.mkdir()
        control.mkdir()
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environ |= meeting | {"CHAOS_CONTROL": str(control), "OMP_NUM_THREADS": "1"}
        self._log = directory / "reference.log"
        with self._log.open("wb") as log:
            self._ranks = [
                subprocess.Popen(
                    [sys.executable, str(PROGRAM), *arguments(self._output)],
                    cwd=directory, stdout=log, stderr=log, env=environ | {"RANK": str(rank)}, start_new_session=True,
                )
                for rank in range(ranks)
            ]  # fmt: skip

    def weights(self, seconds: float) -> Path:
        codes = [rank.wait(seconds) for rank in self._ranks]
        assert not any(codes), f"the run that nobody touched failed by itself\n{self._log.read_text()[-4000:]}"
        return self._output / "final.pt"

    def close(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()


class EngineMemory(threading.Thread):
    """Shows on GPU 0 of each node what the engine there holds while it lives, as the driver does."""

    def __init__(self, worlds: dict[str, NvmlWorld], control: Path) -> None:
        super().__init__(daemon=True)
        self._worlds, self._control, self._ended = worlds, control, threading.Event()
        self._shown = dict.fromkeys(worlds, 0)

    def run(self) -> None:
        while not self._ended.wait(0.05):
            for name, world in self._worlds.items():
                used = 60 * GIB if _locked(self._control / f"engine-{name}.lock") else 0
                if used != self._shown[name]:
                    self._shown[name] = used
                    with contextlib.suppress(OSError):  # the node is off, and its disk with it
                        world.set_memory(0, used)

    def stop(self) -> None:
        self._ended.set()
        self.join()


def _locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def arguments(output: Path) -> list[str]:
    return ["--output_dir", str(output), "--steps", str(STEPS), "--interval", str(INTERVAL)]


class GangTraining:
    """One run. ``output`` is on the disk that all nodes share, the state directory on each node's own."""

    def __init__(self, lab: Lab, root: Path, name: str) -> None:
        self.lab, self.run_id = lab, name
        self.directory = lab.root / "jobs" / name
        self.control = self.directory / "control"
        self.control.mkdir(parents=True)
        (self.control / "slow").touch()
        self.output = self.directory / "outputs"
        self.store = B2Server(root / "b2").start()
        self.reference = UntouchedRanks(root, len(lab.nodes))
        self._memory: EngineMemory | None = None
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{lab.environ['PATH']}",
            "B2_ENVIRONMENT": self.store.url, "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY,
            "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "CHAOS_CONTROL": str(self.control),
        }  # fmt: skip
        self.configure()

    def configure(self) -> None:
        ranks = (
            f'{TORCHRUN} --nnodes="$PODWATCH_NODE_COUNT" --node-rank="$PODWATCH_NODE_RANK" --nproc-per-node=1'
            f' --max-restarts=0 --master-addr=127.0.0.1 --master-port={free_port()} {PROGRAM} "$@"'
        )
        script = f"exec {ranks}"
        if self._memory is not None:  # a launcher as prime-rl's: it starts both, and ignores an exit code of 0
            here = f'"{self.control}/engine-$SLURMD_NODENAME.lock" "{self.control}/engine.$SLURMD_NODENAME"'
            script = f"{sys.executable} -S {ENGINE} {here} & {ranks}; code=$?; kill $!; wait $!; exit $code"
        command = ["sh", "-c", script, "torchrun", *arguments(self.output)]
        config, times = own_times.split(f"""
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
inference = {[] if self._memory is None else [0]}
[inference]
poll = "0.5s"
[recovery]
end_grace = "15s"
[checkpoints]
rescan = "0.5s"
settle = "0.3s"
settle_weak = "1s"
[nodes]
silence = "60s"
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
        (self.directory / "podwatch.toml").write_text(config)
        self.environ |= own_times.write(times, self.directory / "test-times.toml")

    def with_gpus(self) -> dict[str, NvmlWorld]:
        """One busy GPU on each node, as NVML shows it, and a hang that counts after 10 s."""
        worlds = self._gpus()
        with (self.directory / "podwatch.toml").open("a") as out:
            out.write('[hang]\nfloor = "10s"\nagree = "2s"\n')
        return worlds

    def with_engines(self) -> None:
        """An inference server on each node, whose engine holds GPU 0."""
        self._memory = EngineMemory(self._gpus(), self.control)
        self._memory.start()
        self.configure()

    def _gpus(self) -> dict[str, NvmlWorld]:
        inside = self.lab.root / "disk" / "gpus"
        worlds = {name: NvmlWorld(node.disk / inside.name) for name, node in self.lab.nodes.items()}
        for world in worlds.values():
            world.set_load(0, utilization=80)
        library = build_nvml(self.directory / "lib")
        self.environ |= {**NvmlWorld.environment(worlds["n1"], library), "NVML_STANDIN": str(inside)}
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

    def incidents(self, node: str) -> list[dict[str, Any]]:
        """What led to each incident on this node since it was booted, oldest first."""
        directory = self.lab.nodes[node].disk / self.run_id / "state"
        found = sorted(directory.rglob("incidents/*/finding.json"), key=lambda path: path.stat().st_mtime_ns)
        return [json.loads(path.read_text()) for path in found]

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
        got = torch.load(self.output / "final.pt", weights_only=True)
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
        if self._memory is not None:
            self._memory.stop()
        self.reference.close()
        self.store.stop()


def name_of(test: str) -> str:
    """A run's name, one for each case of a test."""
    return re.sub(r"[^a-z0-9]+", "-", test.removeprefix("test_")).strip("-")


# -- what happens to a run ---------------------------------------------------------------------------------------------


def a_killed_engine(run: GangTraining, root: Path, rank: int) -> None:
    """The engine of one node gets SIGKILL while its ranks wait for the next order: its server ends with code 0, its
    memory is free, and training lives. All nodes end, continue from the same step, and the weights are the same."""
    lab, node = run.lab, f"n{rank + 1}"
    run.with_engines()
    (run.control / "hold").touch()
    job = run.submit()
    run.wait_stored(INTERVAL, job)
    order = run.control / f"engine.{node}"
    order.touch()
    run.wait(lambda: not order.exists(), "the engine is killed", job)
    run.wait(lambda: lab.job(job).get("Restarts") == "1", "Slurm starts the job again", job)
    found = {name: run.incidents(name) for name in lab.nodes}
    (run.control / "hold").unlink()
    run.quick()
    run.wait_completed(job)
    said = run.said(job)
    assert set(ends(said)) == {86}, said
    named = re.search(rf"node {rank} \({node}\) failed: [^\"]*?(engine|inference server)[^\"]*", said)
    assert named, said
    assert not re.search(rf"node {1 - rank} \(n\d\) failed", said), said
    for name, incidents in found.items():
        assert len(incidents) == 1, f"{name}: {incidents}"
        kinds = ("silent-death", "required-child-exited") if name == node else ("node-failed",)
        assert incidents[0]["kind"] in kinds, incidents[0]
        assert re.search("engine|inference server", incidents[0]["summary"])
        assert f"node {rank} ({node}) failed" in json.dumps(incidents[0]), "it names the node"
        shown = {one["signal"] for one in incidents[0]["evidence"]}
        assert {"node 0 (n1)", "node 1 (n2)"} <= shown, "and shows where each one was"
    run.finished_well(job, root)
    first, second = (run.lives(name)[-1] for name in lab.nodes)
    assert first["step"] == second["step"] != ""


def a_killed_podwatch(run: GangTraining, root: Path, node: str) -> None:
    """SIGKILL for one podwatch: its training ends with it, srun ends the other, and nothing is left on either. Slurm
    does not rerun such a job; a new one continues."""
    lab = run.lab
    job = run.submit()
    run.wait_stored(INTERVAL, job)
    running = lab.nodes[node].processes()
    podwatch = next((pid for pid, command in running.items() if "supervise.py init" in command), None)
    assert podwatch is not None, f"no podwatch on {node}: {running}"
    os.kill(podwatch, signal.SIGKILL)
    run.wait(lambda: lab.state(job) in ("FAILED", "PENDING"), "the job ends", job)
    lab.wait(lab.idle, 60, "nothing is left on the nodes")
    lab.run("scancel", str(job))
    second = run.submit()
    (run.control / "hold").unlink(missing_ok=True)
    run.quick()
    run.wait(lambda: lab.state(second) == "COMPLETED", "the next job completes", second, 180)
    run.finished_well(second, root)
    assert all(run.lives(name)[-1]["step"] for name in lab.nodes), "it continued"
