"""A Slurm cluster of some nodes on this machine: munged, slurmctld and one slurmd each, all private, all stopped at
the end.

Each node is a process, mount and host-name namespace of its own, with its own empty disk at the same path, its own
machine id and its own boot id. So a job that moves finds nothing there, and ``power_off`` ends everything on a node at
once. The network is shared. Nothing outside the lab's directory is read or written, apart from the cgroups that Slurm
makes where it tracks by cgroup.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podwatch.system import procfs
from tests.support.ports import free_port

PATIENCE = 3.0
"""Times what a wait takes at most on a machine that does nothing else."""
MISSING = (
    "needs root"
    if os.geteuid() != 0
    else next(
        (
            f"needs {tool}: apt install munge slurmctld slurmd slurm-client"
            for tool in ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter", "setpriv")
            if not shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        ),
        "",
    )
)
"""Why this suite cannot run here, in one line; empty if it can."""
REPO = Path(__file__).parents[3]
FREEZER = Path("/sys/fs/cgroup/freezer")
WITH_US = ("setpriv", "--pdeathsig", "KILL")
"""The lab ends with the suite, even if that is killed."""
GRACE = 8
"""Seconds between the first SIGTERM of a preempted job and its end (``GraceTime``)."""

_NODE = """
set -e
root=$1 name=$2 kept=$3; shift 3
hostname "$name"
mount -t proc proc /proc
mount --bind "$root/$name/machine-id" /etc/machine-id
mount --bind "$root/$name/boot-id" /proc/sys/kernel/random/boot_id
mount -t tmpfs -o size=1g tmpfs "$root/disk"
for shared in /run /dev/shm; do mount -t tmpfs tmpfs "$shared"; done
mount --bind /tmp "$root/$name/tmp"
mount -t tmpfs tmpfs /tmp
for path in $kept; do
    mkdir -p "$path"
    mount --bind "$root/$name/$path" "$path"
done
"$@" &
while :; do sleep 0.2; done
"""
"""/run, /tmp and /dev/shm are the node's own, because locks and sockets are there. ``kept``: paths below /tmp that the
node needs from the machine, such as this repository in a temporary clone. PID 1 waits for its own sleep only, reaps
whatever else ends, and ignores SIGTERM as every PID 1."""


def cgroup_missing() -> str:
    """Why Slurm cannot track processes by cgroup on this machine, in one line; empty if it can."""
    if not FREEZER.is_dir():
        return "no cgroup v1 freezer here: Slurm 22.05 tracks by cgroup v2 only below systemd"
    trial = FREEZER / f"podwatch-{os.getpid()}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        return f"the cgroup v1 freezer cannot be written: {error.strerror}"
    return ""


def _below_tmp() -> list[str]:
    """The repository and the Pythons in use, as far as they are below /tmp."""
    needed = {REPO, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return sorted(str(path) for path in needed if path.is_relative_to("/tmp"))


class Node:
    """One machine of the cluster; ``boot`` after ``power_off`` gives it an empty disk."""

    def __init__(self, lab: "Lab", name: str) -> None:
        self._lab, self.name = lab, name
        self._outer: subprocess.Popen[bytes] | None = None
        self.directory = lab.root / name
        for directory in ("spool", "tmp"):
            (self.directory / directory).mkdir(parents=True)
        (self.directory / "machine-id").write_text(uuid.uuid4().hex + "\n")

    def boot(self) -> None:
        (self.directory / "boot-id").write_text(f"{uuid.uuid4()}\n")
        slurmd = ["slurmd", "-D", "-N", self.name, "-f", str(self._lab.conf)]
        with (self.directory / "console.log").open("ab") as log:
            self._outer = subprocess.Popen(
                [*WITH_US, "unshare", "--pid", "--fork", "--kill-child", "--mount", "--uts", "sh", "-c", _NODE, "sh",
                 str(self._lab.root), self.name, " ".join(_below_tmp()), *slurmd],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._lab.environ, start_new_session=True,
            )  # fmt: skip

    @property
    def up(self) -> bool:
        return self._outer is not None and self._outer.poll() is None

    @property
    def first(self) -> int:
        """PID 1 of the node, as the host numbers it."""
        assert self._outer is not None
        (pid,) = procfs.children(self._outer.pid)
        return pid

    @property
    def disk(self) -> Path:
        """The node's own disk, as seen from outside."""
        return Path(f"/proc/{self.first}/root{self._lab.root}/disk")

    def processes(self) -> dict[int, str]:
        """pid on the host -> command line of everything alive on the node, apart from PID 1, its sleep and slurmd."""
        first, found = self.first, {}
        here = Path(f"/proc/{first}/ns/pid").readlink()
        for pid in procfs.all_pids():
            try:
                if pid == first or Path(f"/proc/{pid}/ns/pid").readlink() != here:
                    continue
            except OSError:
                continue
            life, words = procfs.read_stat(pid), procfs.command(pid)
            if life is None or life.state in "ZX" or not words or words[:1] in (("slurmd",), ("sleep",)):
                continue
            found[pid] = " ".join(words)
        return found

    @property
    def agent(self) -> int:
        """slurmd's pid on the host; 0 if it does not run."""
        found = [pid for pid in procfs.children(self.first) if procfs.command(pid)[:1] == ("slurmd",)]
        return found[0] if found else 0

    def kill_slurmd(self) -> None:
        """The node's agent alone: what the network's end looks like to the controller. Jobs on the node live on."""
        os.kill(self.agent, signal.SIGKILL)

    def restart_slurmd(self) -> None:
        with (self.directory / "console.log").open("ab") as log:
            subprocess.Popen(
                ["nsenter", "-t", str(self.first), "--mount", "--pid", "--uts", "slurmd", "-N", self.name, "-f",
                 str(self._lab.conf)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._lab.environ, start_new_session=True,
            ).wait(30)  # fmt: skip

    def power_off(self) -> None:
        """Everything on the node ends in this moment, and its disk is gone."""
        if self.up:
            os.kill(self.first, signal.SIGKILL)
        if self._outer is not None:
            self._outer.wait(30)
        self._outer = None


class Lab:
    """``nodes``: by name, n1, n2, ...; ``tracking``: linuxproc (a job's processes by parent) or cgroup."""

    def __init__(self, tracking: str = "linuxproc", *, requeue: bool = True, nodes: int = 2) -> None:
        """``requeue``: ``RequeueExit=86`` and ``RequeueExitHold=65``, as an administrator would set them."""
        self.root = Path(tempfile.mkdtemp(prefix="pw-slurm-", dir="/var/tmp"))  # a node has its own /tmp
        self.root.chmod(0o755)
        self.conf = self.root / "slurm.conf"
        for name in ("disk", "state", "jobs"):
            (self.root / name).mkdir()
        keep = {k: v for k, v in os.environ.items() if k in ("LANG", "TZ", "HOME")}
        self.environ = {
            **keep,
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin",
            "SLURM_CONF": str(self.conf),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []
        names = [f"n{number}" for number in range(1, nodes + 1)]
        self._ports = {name: free_port() for name in ("controller", *names)}
        self.nodes = {name: Node(self, name) for name in names}
        self.conf.write_text(self._configuration(tracking, requeue))
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for number in (0, 1):
            os.mknod(self.root / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # Slurm wants a device file
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[0-1]\n")

    def _configuration(self, tracking: str, requeue: bool) -> str:
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={self._ports[name]} CPUs=1 Gres=gpu:2"
            for name in self.nodes
        )
        names = ",".join(self.nodes)
        codes = "RequeueExit=86\nRequeueExitHold=65\n" if requeue else ""
        return f"""
ClusterName=lab
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={self._ports["controller"]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={self.root}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/%n/spool
SlurmctldPidFile={self.root}/slurmctld.pid
SlurmdPidFile={self.root}/%n/slurmd.pid
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmdTimeout=15
KillWait=20
MinJobAge=3600
ReturnToService=2
SlurmdParameters=config_overrides
JobCompType=jobcomp/filetxt
JobCompLoc={self.root}/jobcomp.txt
SchedulerParameters=bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{codes}{nodes}
PartitionName=low Nodes={names} Default=YES OverSubscribe=EXCLUSIVE PriorityTier=1 GraceTime={GRACE}
PartitionName=high Nodes={names} OverSubscribe=EXCLUSIVE PriorityTier=10 PreemptMode=OFF
"""

    # -- life

    def start(self) -> "Lab":
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        self._daemon("munged", "--foreground", "--force", "--num-threads=2",
                     *(f"--{name}={self.root / file}" for name, file in names.items()))  # fmt: skip
        self.wait((self.root / "munge.socket").exists, 10, "munged")
        self._daemon("slurmctld", "-D", "-c", "-f", str(self.conf))
        for node in self.nodes.values():
            node.boot()
        self.wait(lambda: all(self.node_state(name) == "IDLE" for name in self.nodes), 30, "all nodes are idle")
        return self

    def recover(self) -> None:
        """Bring back every node that a test lost or drained."""
        for name, node in self.nodes.items():
            if not node.up:
                node.boot()
            elif not node.agent:
                node.restart_slurmd()
            if self.node_state(name) != "IDLE":
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        self.wait(lambda: all(self.node_state(name) == "IDLE" for name in self.nodes), 30, "all nodes are idle")

    def _daemon(self, *command: str) -> None:
        with (self.root / f"{command[0]}.console").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*WITH_US, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environ
                )
            )

    def close(self) -> None:
        """End every job, node and daemon, and remove the lab."""
        for node in self.nodes.values():
            node.power_off()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for name in self.nodes:
            for directory in sorted(FREEZER.glob(f"slurm_{name}/**/"), reverse=True):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        shutil.rmtree(self.root, ignore_errors=True)

    # -- commands

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.environ, cwd=self.root / "jobs", capture_output=True, text=True,
                              timeout=60)  # fmt: skip
        if check and done.returncode != 0:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}\n{self.logs()}")
        return done.stdout + done.stderr

    def submit(self, *arguments: str, environ: dict[str, str] | None = None) -> int:
        """``sbatch ARGUMENTS``; the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *arguments], env={**self.environ, **(environ or {})}, cwd=self.root / "jobs",
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """``scontrol show job``, key by key."""
        text = self.run("scontrol", "show", "job", "-o", str(number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def state(self, number: int) -> str:
        return self.job(number)["JobState"]

    def node_state(self, name: str) -> str:
        try:
            return self.run("sinfo", "-h", "-N", "-p", "low", "-n", name, "-o", "%T").strip().upper()
        except (AssertionError, subprocess.TimeoutExpired):
            return "?"

    def ends(self, number: int) -> list[dict[str, str]]:
        """Every end of this job so far, requeued ones included, oldest first (jobcomp/filetxt)."""
        try:
            lines = (self.root / "jobcomp.txt").read_text().splitlines()
        except OSError:
            return []
        found = [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in lines]
        return [end for end in found if end.get("JobId") == str(number)]

    def idle(self) -> bool:
        """No process of any job is left on any node that is up."""
        return not any(node.processes() for node in self.nodes.values() if node.up)

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        end = time.monotonic() + PATIENCE * seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            time.sleep(0.2)
        raise AssertionError(f"not within {PATIENCE * seconds:g} s: {what}\n{self.logs()}")

    def wait_state(self, number: int, state: str, seconds: float = 60) -> dict[str, str]:
        def reached() -> dict[str, str] | None:
            job = self.job(number)
            return job if job["JobState"] == state else None

        found: dict[str, str] = self.wait(reached, seconds, f"job {number} is {state}")
        return found

    def logs(self) -> str:
        """The ends of all logs, and the queue."""
        queue = subprocess.run(["scontrol", "show", "job"], env=self.environ, capture_output=True, text=True)
        parts = [queue.stdout]
        for path in (*self.root.glob("jobs/*.out"), *self.root.glob("*.console"), *self.root.glob("n?/*.log")):
            with contextlib.suppress(OSError):
                parts.append(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(parts)
