"""The torch example as a Slurm job: ``sbatch examples/engines/slurm.sbatch``, as it is shipped, in a directory with a
podwatch.toml; a B2 server on the machine; and the questions that every scenario ends with."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.suites.chaos.guarded_run import Uninterrupted, example_command
from tests.suites.slurm.lab import Lab
from tests.support import own_times
from tests.support.b2server import BUCKET, KEY, KEY_ID, B2Server

EXAMPLE = Path(__file__).parents[3] / "examples" / "engines" / "slurm.sbatch"
FAULTS = Path(__file__).with_name("faults")
VARIANT = "A"
STEPS = 64
GONE = ("FAILED", "CANCELLED", "COMPLETED", "SPECIAL_EXIT")
PATIENCE = 90.0
"""Seconds for anything that takes a few on a machine that does nothing else: a start imports torch three times."""


class SlurmTraining:
    """One run. ``submit`` can be called again: a second job of the same run."""

    def __init__(self, lab: Lab, root: Path, name: str) -> None:
        self.lab, self.run_id = lab, name
        self.directory, self.control = lab.root / "jobs" / name, lab.root / "jobs" / name / "control"
        self.control.mkdir(parents=True)
        (self.control / "slow").touch()
        self.output = lab.root / "disk" / name / "outputs"
        self.store = B2Server(root / "b2").start()
        self.reference = Uninterrupted(root, VARIANT, STEPS)
        self.environ = {
            "PATH": f"{Path(sys.executable).parent}:{lab.environ['PATH']}",
            "B2_ENVIRONMENT": self.store.url, "B2_APPLICATION_KEY_ID": KEY_ID, "B2_APPLICATION_KEY": KEY,
            "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
        }  # fmt: skip
        self.configure()

    def configure(self, *more: str) -> None:
        """Write podwatch.toml. ``more``: further words of the training command."""
        config, times = own_times.split(f"""
run_id = "{self.run_id}"
state_dir = "{self.lab.root}/disk/{self.run_id}/state"
[trainer]
layout = "prime-rl"
output_dir = "{self.output}"
cwd = "{self.directory}"
command = {json.dumps([*example_command(self.output, VARIANT, STEPS), *more])}
stop_grace = "2s"
save_grace = "2s"
[trainer.env]
PYTHONPATH = "{FAULTS}"
CHAOS_CONTROL = "{self.control}"
[gpu]
poll = "0.5s"
[checkpoints]
rescan = "0.5s"
settle = "0.3s"
[recovery]
backoff_min = "0.2s"
backoff_max = "1s"
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

    # -- the job

    def submit(self, *arguments: str) -> int:
        where = [f"--chdir={self.directory}", f"--output={self.directory}/%j.out"]
        return self.lab.submit(*where, *arguments, str(EXAMPLE), environ=self.environ)

    def wait_completed(self, job: int) -> None:
        self.wait(lambda: self.lab.state(job) == "COMPLETED", "the job completes", job)

    def said(self, job: int) -> str:
        """All that the job printed, of all its attempts."""
        try:
            return (self.directory / f"{job}.out").read_text(errors="replace")
        except OSError:
            return ""

    def wait(self, condition: Callable[[], Any], what: str, job: int, seconds: float = PATIENCE) -> Any:
        """While the job can still bring it about: one that is over fails the test at once."""

        def met() -> Any:
            value = condition()
            assert value or self.lab.state(job) not in GONE or condition(), "the job is over"
            return value

        try:
            return self.lab.wait(met, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}\n--- the job\n{self.said(job)[-6000:]}") from None

    def lives(self) -> list[dict[str, Any]]:
        """Launchers that began, oldest first, with ``resumed`` (None: fresh)."""
        try:
            lines = (self.control / "lives.jsonl").read_text().splitlines()
        except OSError:
            return []
        found = [life for life in map(json.loads, lines) if life["role"] == "rl"]
        for life in found:
            words = life["argv"]
            life["resumed"] = (
                int(words[words.index("--ckpt.resume-step") + 1]) if "--ckpt.resume-step" in words else None
            )
        return found

    # -- the store

    def podwatch(self, *arguments: str) -> str:
        """A podwatch command from outside, with the run's configuration."""
        outside = {k: v for k, v in os.environ.items() if not k.startswith(("B2_", "PODWATCH_"))}
        done = subprocess.run(
            [sys.executable, "-m", "podwatch", "-c", str(self.directory / "podwatch.toml"), *arguments],
            env={**outside, **self.environ}, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stored(self) -> int:
        """The step that ``latest.json`` names; 0 for none."""
        return int(self._newest("latest.json").get("step") or 0)

    def heartbeat(self) -> dict[str, Any]:
        return self._newest("heartbeat.json")

    def _newest(self, name: str) -> dict[str, Any]:
        """The newest version of a JSON object of this run; empty if there is none."""
        versions = [v for v in self.store.versions(name) if v["action"] == "upload"]
        if not versions:
            return {}
        body = self.store.directory / "body" / max(versions, key=lambda v: v["number"])["file_id"]
        found: dict[str, Any] = json.loads(body.read_bytes())
        return found

    def wait_stored(self, step: int, job: int) -> None:
        self.wait(lambda: self.stored() >= step, f"step {step} is in the store", job)
        assert self.stored() < STEPS, "the run ended before anything happened to it: SLOW_SECONDS is too short"

    def quick(self) -> None:
        """What is left is made as fast as it goes."""
        (self.control / "slow").unlink()

    # -- the end

    def finished_well(self, job: int, node: str, root: Path) -> None:
        """Asked at once after the job has ended: nothing of it can still do anything."""
        assert self.lab.idle(), {n.name: n.processes() for n in self.lab.nodes.values() if n.up}
        assert self.stored() == STEPS, f"the job ended before its final checkpoint was stored\n{self.said(job)[-4000:]}"
        assert self.lab.job(job)["ExitCode"] == "0:0"
        assert not (self.control / "double").exists(), "two trainers at once: " + (self.control / "double").read_text()
        assert not self.store.violations()
        assert "Traceback" not in self.said(job), self.said(job)
        reference = self.reference.weights(PATIENCE)
        self._same_weights(reference, self.lab.nodes[node].disk / self.run_id / "outputs" / "final.pt")
        restored = root / "restored"
        self.podwatch("restore", "--to", str(restored))
        self._same_checkpoint(reference.parent, restored)

    def _same_weights(self, want: Path, got: Path) -> None:
        import torch

        first, second = (torch.load(path, weights_only=True) for path in (want, got))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[k], second[k]) for k in first), "other weights than an uninterrupted run's"

    def _same_checkpoint(self, reference: Path, restored: Path) -> None:
        """The stored one, tensor by tensor, optimizer included."""
        (want,) = reference.glob(f"checkpoints/step_{STEPS}/trainer")
        (got,) = (p.parent for p in restored.rglob(".metadata"))
        first, second = _tensors(want), _tensors(got)
        assert first.keys() == second.keys()
        assert all(_equal(first[k], second[k]) for k in first), "the stored checkpoint is another one"

    def close(self) -> None:
        self.reference.close()
        self.store.stop()


def _tensors(checkpoint: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = checkpoint.parent / "whole.pt"
    dcp_to_torch_save(checkpoint, target)
    return _flat(torch.load(target, weights_only=False))


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{name}/{key}").items()}
    if isinstance(value, list):
        return {k: v for key, inner in enumerate(value) for k, v in _flat(inner, f"{name}/{key}").items()}
    return {name: value}


def _equal(first: Any, second: Any) -> bool:
    import torch

    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def ends(text: str) -> list[int]:
    """Exit codes that srun reported, oldest first."""
    return [int(code) for code in re.findall(r"task 0: Exited with exit code (\d+)", text)]
