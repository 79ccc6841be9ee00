"""Findings about the machine's limits: disk, open files, memory, /dev/shm. They never request an action.

``disk.plan`` decides what to delete from a full disk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from podwatch.config.settings import DiskSettings, ResourceSettings
from podwatch.detection.base import DetectorResult, Look
from podwatch.detection.learned import Learned
from podwatch.detection.windows import QUIET, Latch, Latches, kept
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import HostSample, Snapshot

GIB = 1 << 30
HOLD_SECONDS = 15.0
"""Two readings of the host sensor: a single one can be a short burst."""
RELEASE_SECONDS = 60.0
GAP = 0.05
"""A warning is cleared this far below its threshold."""
CRITICAL_ABOVE = 0.98
"""Above this share the next allocation, file or segment can fail."""
OOM_SHOWN_SECONDS = 3600.0
"""How long an OOM kill is shown; the journal keeps it."""


@dataclass(frozen=True, slots=True)
class ResourcesState:
    """``oom_kills``: the counter as last read. ``killed``: OOM kills seen by podwatch, the newest
    at ``killed_at``."""

    latches: Latches = ()
    taken_at: float | None = None
    oom_kills: int | None = None
    killed: int = 0
    killed_at: float | None = None


class ResourcesDetector:
    name = "resources"
    kinds = (
        FindingKind.DISK_HIGH, FindingKind.INODES_LOW, FindingKind.FILES_LOW, FindingKind.MEMORY_LOW,
        FindingKind.OUT_OF_MEMORY, FindingKind.SHM_LOW,
    )  # fmt: skip
    needs = ("disk", "host")
    second: tuple[str, ...] = ()
    survives_restart = True

    def initial(self) -> ResourcesState:
        return ResourcesState()

    def armed(self, state: ResourcesState, learned: Learned) -> tuple[str, ...]:
        return ()

    def advance(self, state: ResourcesState, look: Look) -> DetectorResult[ResourcesState]:
        snapshot = look.snapshot
        findings = list(_disk(snapshot, look.policies.disk))
        host = snapshot.host.value if snapshot.host.ok else None
        if host is not None:
            if snapshot.host.at != state.taken_at:
                state = _take(state, host, snapshot.host.at, look.policies.resources)
            if state.latches or state.killed:
                findings.extend(_host(state, host, look.policies.resources, snapshot.at))
        return DetectorResult(state, look.learned, tuple(findings))


DETECTOR = ResourcesDetector()


def _ratios(host: HostSample) -> Iterator[tuple[str, float | None]]:
    """The used share of each limit, 0 to 1; None if this machine does not report it."""
    yield "files", max((use.open_files / use.limit for use in host.files), default=None)
    total = host.memory_total_bytes
    yield "host", 1.0 - host.memory_available_bytes / total if total else None
    limit, used = host.cgroup_limit_bytes, host.cgroup_used_bytes
    yield "container", used / limit if limit and used is not None else None
    room, taken = host.shm_total_bytes, host.shm_used_bytes
    yield "shm", taken / room if room and taken is not None else None


def _marks(resources: ResourceSettings) -> dict[str, float]:
    return {
        "files": resources.files_above, "host": resources.memory_above, "container": resources.memory_above,
        "shm": resources.shm_above,
    }  # fmt: skip


def _take(state: ResourcesState, host: HostSample, at: float, resources: ResourceSettings) -> ResourcesState:
    """Take one new reading of the host sensor."""
    latches = dict(state.latches)
    marks = _marks(resources)
    for name, ratio in _ratios(host):
        over = None if ratio is None else ratio > marks[name]
        gone = None if ratio is None else ratio < marks[name] - GAP
        latches[name] = latches.get(name, QUIET).update(over, at, hold=HOLD_SECONDS, gone=gone, release=RELEASE_SECONDS)
    killed = _kills(state, host)
    return ResourcesState(
        kept(latches),
        at,
        host.oom_kills if host.oom_kills is not None else state.oom_kills,
        (state.killed if _shown(state, at) else 0) + killed,
        at if killed else state.killed_at,
    )


def _shown(state: ResourcesState, at: float) -> bool:
    return state.killed_at is not None and at - state.killed_at < OOM_SHOWN_SECONDS


def _kills(state: ResourcesState, host: HostSample) -> int:
    """OOM kills in the trainer's cgroup since the last reading."""
    if host.oom_kills is None or state.oom_kills is None:
        return 0
    # A lower number is the counter of a new cgroup (training was restarted): all its kills are new.
    grown = host.oom_kills - state.oom_kills
    return grown if grown >= 0 else host.oom_kills


def _host(state: ResourcesState, host: HostSample, resources: ResourceSettings, at: float) -> Iterator[Finding]:
    latches, ratios = dict(state.latches), dict(_ratios(host))
    marks = _marks(resources)

    def raised(name: str) -> tuple[Latch, float] | None:
        latch, ratio = latches.get(name, QUIET), ratios.get(name)
        return (latch, ratio) if latch.raised and ratio is not None else None

    if (found := raised("files")) is not None and host.files:
        use = host.files[0]
        yield _limit(
            FindingKind.FILES_LOW, "", found, at, marks["files"],
            f"{use.name} (pid {use.pid}) has {use.open_files} of {use.limit} files open",
            "set [trainer] nofile = 65536 to raise the limit at the next start; if the number only grows, a process"
            " leaks open files",
        )  # fmt: skip
    if (found := raised("host")) is not None:
        yield _limit(
            FindingKind.MEMORY_LOW, "host", found, at, marks["host"],
            f"the machine has {host.memory_available_bytes / GIB:.1f} of {host.memory_total_bytes / GIB:.0f} GiB of"
            " memory left",
            "the kernel kills the biggest process when memory runs out: use fewer workers, smaller buffers, or a bigger"
            " pod",
        )  # fmt: skip
    if (found := raised("container")) is not None and host.cgroup_limit_bytes and host.cgroup_used_bytes is not None:
        yield _limit(
            FindingKind.MEMORY_LOW, "container", found, at, marks["container"],
            f"the container uses {host.cgroup_used_bytes / GIB:.1f} of {host.cgroup_limit_bytes / GIB:.1f} GiB of"
            " memory (without page cache)",
            "the kernel kills a process of the container at the limit: use fewer workers, smaller buffers, or a bigger"
            " limit",
        )  # fmt: skip
    if (found := raised("shm")) is not None and host.shm_total_bytes and host.shm_used_bytes is not None:
        yield _limit(
            FindingKind.SHM_LOW, "", found, at, marks["shm"],
            f"/dev/shm is {found[1]:.0%} full ({host.shm_used_bytes / GIB:.1f} of {host.shm_total_bytes / GIB:.1f}"
            " GiB)",
            "NCCL and vLLM die with a bus error when it is full: enlarge it (docker --shm-size), or delete the files of"
            " earlier starts (/dev/shm/vllm-*, /dev/shm/nccl-*)",
        )  # fmt: skip
    if state.killed and state.killed_at is not None and _shown(state, at):
        yield Finding(
            FindingKind.OUT_OF_MEMORY,
            Severity.CRITICAL,
            f"the kernel killed {state.killed} process{'es' if state.killed > 1 else ''} because memory ran out in"
            " the trainer's cgroup",
            state.killed_at,
            suggestion="use a bigger pod, fewer workers, or less of /dev/shm; `dmesg` names the process, if readable",
            evidence=(Evidence("oom kills", str(state.killed), Agreement.AGREES, at - state.killed_at),),
        )


def _limit(
    kind: FindingKind, subject: str, found: tuple[Latch, float], at: float, mark: float, summary: str, fix: str
) -> Finding:
    latch, ratio = found
    since = latch.since if latch.since is not None else at
    return Finding(
        kind,
        Severity.CRITICAL if ratio > max(mark, CRITICAL_ABOVE) else Severity.WARNING,
        summary,
        since,
        suggestion=fix,
        evidence=(
            Evidence(subject or str(kind), f"{ratio:.3f} used (warns above {mark:g})", Agreement.AGREES, at - since),
        ),
        subject=subject,
    )


def _disk(snapshot: Snapshot, policy: DiskSettings) -> tuple[Finding, ...]:
    if not snapshot.disk.ok or snapshot.disk.value is None:
        return ()
    disk = snapshot.disk.value
    findings = []
    if disk.used_ratio > policy.prune_above:
        findings.append(
            Finding(
                FindingKind.DISK_HIGH,
                Severity.WARNING,
                f"{disk.path} is {disk.used_ratio:.0%} full (podwatch deletes old checkpoints above"
                f" {policy.prune_above:.0%})",
                snapshot.disk.at,
                suggestion="`podwatch prune --dry-run` shows what podwatch can delete",
                evidence=(Evidence("disk", f"{disk.used_ratio:.3f} used", Agreement.AGREES),),
            )
        )
    if disk.inodes_low:
        findings.append(
            Finding(
                FindingKind.INODES_LOW,
                Severity.WARNING,
                f"{disk.path} has {disk.inodes_free} of {disk.inodes_total} inodes left",
                snapshot.disk.at,
                suggestion="delete small files that you do not need; rollouts and broadcasts are usually the most",
                evidence=(Evidence("inodes", f"{disk.inodes_free} free", Agreement.AGREES),),
            )
        )
    return tuple(findings)
