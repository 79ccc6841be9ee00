"""Warnings about the machine: a row for each limit, and the faults that the GPU's driver reports (``xid.toml``). They
never request an action; ``disk.plan`` decides what to delete from a full disk.
"""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from podwatch.config.settings import Policies
from podwatch.detection.observe import OOM_SHOWN_SECONDS, Turn
from podwatch.detection.start import LIMIT, THROTTLED, Machine
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity, counted
from podwatch.domain.snapshot import GpuSample, HostSample, Reading, Snapshot, XidEvent

GIB = 1 << 30
HOLD_SECONDS = 15.0
"""Two readings of the host: a single one can be a short burst."""
CLEAR_BELOW = 0.05
"""A warning is cleared this far below its limit."""
CRITICAL_ABOVE = 0.98
"""Above this share the next allocation, file or segment can fail."""
THROTTLED_SECONDS = 300.0
"""A GPU that is throttled for this long is a finding."""


# -- limits of the machine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """A row. ``of``: the reading that it judges. ``used``: the used share, 0 to 1; None if this machine does not report
    it. ``limit``: the share above which it warns. ``says``: what is short, in
    words, from the value and the limit. ``hold``: for so many seconds."""

    name: str
    kind: FindingKind
    of: Callable[[Snapshot], Reading[Any]]
    used: Callable[[Any], float | None]
    limit: Callable[[Policies], float]
    says: Callable[[Any, float], str]
    fix: str
    subject: str = ""
    hold: float = HOLD_SECONDS
    critical_above: float = CRITICAL_ABOVE


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if whole and part is not None else None


def _gib(size: int | None) -> str:
    return f"{(size or 0) / GIB:.1f}"


LIMITS = (
    Limit(
        "disk", FindingKind.DISK_HIGH, lambda pod: pod.disk,
        lambda disk: disk.used_ratio,
        lambda policies: policies.disk.prune_above,
        lambda disk, above: f"{disk.path} is {disk.used_ratio:.0%} full (podwatch deletes old checkpoints above"
        f" {above:.0%})",
        "`podwatch prune --dry-run` shows what podwatch can delete",
        hold=0.0, critical_above=1.0,
    ),
    Limit(
        "inodes", FindingKind.INODES_LOW, lambda pod: pod.disk,
        lambda disk: float(disk.inodes_low),
        lambda _: 0.5,
        lambda disk, _: f"{disk.path} has {disk.inodes_free} of {disk.inodes_total} inodes left",
        "delete small files that you do not need; rollouts and broadcasts are usually the most",
        hold=0.0, critical_above=1.0,
    ),
    Limit(
        "files", FindingKind.FILES_LOW, lambda pod: pod.host,
        lambda host: max((use.open_files / use.limit for use in host.files), default=None),
        lambda policies: policies.resources.files_above,
        lambda host, _: f"{host.files[0].name} (pid {host.files[0].pid}) has {host.files[0].open_files} of"
        f" {host.files[0].limit} files open",
        "set [trainer] nofile = 65536 to raise the limit at the next start; if the number only grows, a process leaks"
        " open files",
    ),
    Limit(
        "host", FindingKind.MEMORY_LOW, lambda pod: pod.host,
        lambda host: _share(host.memory_total_bytes - host.memory_available_bytes, host.memory_total_bytes),
        lambda policies: policies.resources.memory_above,
        lambda host, _: f"the machine has {_gib(host.memory_available_bytes)} of {host.memory_total_bytes / GIB:.0f}"
        " GiB of memory left",
        "the kernel kills the biggest process when memory runs out: use fewer workers, smaller buffers, or a bigger"
        " pod",
        "host",
    ),
    Limit(
        "container", FindingKind.MEMORY_LOW, lambda pod: pod.host,
        lambda host: _share(host.cgroup_used_bytes, host.cgroup_limit_bytes),
        lambda policies: policies.resources.memory_above,
        lambda host, _: f"the container uses {_gib(host.cgroup_used_bytes)} of {_gib(host.cgroup_limit_bytes)} GiB of"
        " memory (without page cache)",
        "the kernel kills a process of the container at the limit: use fewer workers, smaller buffers, or a bigger"
        " limit",
        "container",
    ),
    Limit(
        "shm", FindingKind.SHM_LOW, lambda pod: pod.host,
        lambda host: _share(host.shm_used_bytes, host.shm_total_bytes),
        lambda policies: policies.resources.shm_above,
        lambda host, _: f"/dev/shm is {_share(host.shm_used_bytes, host.shm_total_bytes) or 0:.0%} full"
        f" ({_gib(host.shm_used_bytes)} of {_gib(host.shm_total_bytes)} GiB)",
        "NCCL and vLLM die with a bus error when it is full: enlarge it (docker --shm-size), or delete the files of"
        " earlier starts (/dev/shm/vllm-*, /dev/shm/nccl-*)",
    ),
)  # fmt: skip


def resources(turn: Turn) -> Iterator[Finding]:
    """Each limit of the machine that is nearly reached, and processes that were killed for memory."""
    for row in LIMITS:
        reading = row.of(turn.snapshot)
        if reading.ok and reading.value is not None:
            yield from _near(turn, row, reading.value, reading.at)
    host = turn.snapshot.host
    if host.ok and host.value is not None:
        yield from _killed(turn.machine, turn.at)
        yield from _few_files(turn, host.value)


def _near(turn: Turn, row: Limit, value: Any, at: float) -> Iterator[Finding]:
    name, used, limit = f"{LIMIT}{row.name}", row.used(value), row.limit(turn.policies)
    raised = row.hold > 0.0 and turn.machine.of(name).lasts(row.hold)  # a disk is as full as it is now
    over = used is not None and used > (limit - CLEAR_BELOW if raised else limit)
    window = turn.machine.watch(name, False if over else None if raised else True, at)
    if not window.lasts(row.hold) or window.since is None or used is None:
        return
    severity = Severity.CRITICAL if used > max(limit, row.critical_above) else Severity.WARNING
    shown = f"{used:.3f} used (warns above {limit:g})"
    evidence = (Evidence(row.subject or str(row.kind), shown, Agreement.AGREES, turn.at - window.since),)
    yield Finding(
        row.kind, severity, row.says(value, limit), window.since, row.fix, evidence=evidence, subject=row.subject
    )


def _few_files(turn: Turn, host: HostSample) -> Iterator[Finding]:
    """A note: the limit with which training was started is below the configured one; how much of it is used has a
    warning of its own. Judged by the process that may open the most: a single one may have lowered its own."""
    most, wanted = max((use.limit for use in host.files), default=None), turn.policies.nofile
    if most is None or most >= wanted:
        return
    yield Finding(
        FindingKind.FILES_LOW,
        Severity.INFO,
        f"training can open only {most} files at once, and [trainer] nofile is {wanted}: the pod does not allow more",
        turn.trainer.started_at if turn.trainer.started_at is not None else turn.at,
        suggestion=f"raise the hard limit where the pod is started (docker run --ulimit nofile={wanted}:{wanted},"
        f" LimitNOFILE={wanted} in the unit), or lower [trainer] nofile",
        evidence=(Evidence("open-file limit", f"{most}, wanted {wanted}", Agreement.AGREES),),
        subject="limit",
    )


def _killed(machine: Machine, at: float) -> Iterator[Finding]:
    number, since = sum(grown for _, grown in machine.oom_kills), max((a for a, _ in machine.oom_kills), default=0.0)
    if number and at - since < OOM_SHOWN_SECONDS:
        yield Finding(
            FindingKind.OUT_OF_MEMORY,
            Severity.CRITICAL,
            f"the kernel killed {counted(number, 'process', 'processes')} because memory ran out in the trainer's"
            " cgroup",
            since,
            suggestion="use a bigger pod, fewer workers, or less of /dev/shm; `dmesg` names the process, if readable",
            evidence=(Evidence("oom kills", str(number), Agreement.AGREES, at - since),),
        )


# -- faults of the GPUs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Xid:
    """The meaning of a driver's code. ``severity`` None: for the record only. ``shown``: for how many seconds."""

    code: int
    what: str
    fix: str
    severity: Severity | None
    shown: float


@cache
def xids() -> dict[int, Xid]:
    """By code."""
    table = tomllib.loads(files(__package__).joinpath("xid.toml").read_text())
    return {
        int(code): Xid(
            int(code), what, group["fix"], Severity(group["severity"]) if "severity" in group else None,
            group.get("hours", 0) * 3600.0,
        )
        for group in table.values()
        for code, what in group["codes"].items()
    }  # fmt: skip


def meaning(code: int) -> Xid:
    """The meaning of ``code``. One that is not in the catalogue counts as a fault of the program, the mildest class
    that is still reported."""
    fault = xids()[13]
    return xids().get(code, Xid(code, "not in NVIDIA's catalogue", fault.fix, fault.severity, fault.shown))


WORDS = {
    "hw-thermal": "heat (hardware slowdown)",
    "hw-power-brake": "the power brake (requested by the power supply)",
    "sw-thermal": "heat",
    "hw-slowdown": "heat or power (hardware slowdown)",
}


def gpu_health(turn: Turn) -> Iterator[Finding]:
    """XIDs, uncorrected memory errors among them, and clocks throttled by heat or power."""
    policy, host, gpus = turn.policies.gpu, turn.snapshot.host, turn.snapshot.gpus
    mine = {*policy.inference, *policy.trainer}
    if host.ok and host.value is not None:
        yield from _xids(host.value.xids, mine, turn.at)
    for gpu in gpus.value or () if gpus.ok else ():
        if not mine or gpu.index in mine:
            yield from _throttled(turn, gpu)


def _xids(events: tuple[XidEvent, ...], mine: set[int], at: float) -> Iterator[Finding]:
    """One finding per GPU and code; ``since`` is its first occurrence within the time that it is shown."""
    newest: dict[tuple[int | None, int], tuple[float, float, int]] = {}
    for event in events:
        known = meaning(event.code)
        foreign = mine and event.gpu is not None and event.gpu not in mine
        if not foreign and known.severity is not None and at - event.at <= known.shown:
            first, _, count = newest.get((event.gpu, event.code), (event.at, event.at, 0))
            newest[event.gpu, event.code] = (first, event.at, count + 1)
    for (gpu, code), (first, last, count) in newest.items():
        known = meaning(code)
        where = f"GPU {gpu}" if gpu is not None else "a GPU of this machine"
        yield Finding(
            FindingKind.GPU_FAULT,
            Severity.WARNING if known.severity is Severity.WARNING else Severity.CRITICAL,
            f"{where} reported XID {code}{f', {count} times' if count > 1 else ''}: {known.what}",
            first,
            suggestion=known.fix,
            evidence=(Evidence(f"xid {code}", where, Agreement.AGREES, max(0.0, at - last)),),
            subject=f"gpu{gpu}-xid{code}" if gpu is not None else f"xid{code}",
        )


def _throttled(turn: Turn, gpu: GpuSample) -> Iterator[Finding]:
    name, at = f"{THROTTLED}{gpu.index}", turn.snapshot.gpus.at
    raised = turn.machine.of(name).lasts(THROTTLED_SECONDS)
    window = turn.machine.watch(name, False if gpu.throttled else None if raised else True, at)
    if not window.lasts(THROTTLED_SECONDS) or window.since is None:
        return
    why = " and ".join(WORDS.get(reason, reason) for reason in gpu.throttled) or "an intermittent fault"
    warm = f" ({gpu.temperature_celsius:.0f} degrees Celsius)" if gpu.temperature_celsius is not None else ""
    lasting = turn.at - window.since
    yield Finding(
        FindingKind.GPU_THROTTLED,
        Severity.WARNING,
        f"GPU {gpu.index} has been throttled by {why} for {lasting / 60:.0f} minutes{warm}, so training is slower",
        window.since,
        suggestion="report it to the provider of the machine, or move to another machine",
        evidence=(Evidence(f"gpu{gpu.index} clocks", ", ".join(gpu.throttled), Agreement.AGREES, lasting),),
        subject=f"gpu{gpu.index}",
    )
