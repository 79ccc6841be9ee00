"""Warnings about the machine: a row for each limit, and the faults that the GPU's driver reports (``xid.toml``). They
never request an action; ``policy.local_retention`` decides what to delete from a full disk.
"""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from podwatch.config.settings import Policies
from podwatch.detection.observe import Turn
from podwatch.detection.start import Alarm, Machine
from podwatch.domain.finding import Agreement, Evidence, Finding, FindingKind, Severity
from podwatch.domain.snapshot import GpuSample, HostSample, XidEvent
from podwatch.policy.local_retention import INODES_BELOW

GIB = 1 << 30
HOLD_SECONDS = 15.0
"""Two readings of the host: a single one can be a short burst."""
RELEASE_SECONDS = 60.0
CLEAR_BELOW = 0.05
"""A warning is cleared this far below its limit."""
CRITICAL_ABOVE = 0.98
"""Above this share the next allocation, file or segment can fail."""
OOM_SHOWN_SECONDS = 3600.0
"""How long an OOM kill is shown; the journal keeps it."""
THROTTLED_SECONDS = 300.0
"""A GPU that is throttled for this long is a finding."""
UNTHROTTLED_SECONDS = 90.0
"""Three readings of unthrottled clocks before the warning is cleared."""
ECC_SHOWN_SECONDS = 24 * 3600.0
"""It does not end without a reset, and an operator looks at least daily."""


# -- limits of the machine ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """A row. ``used``: the used share, 0 to 1; None if this machine does not report it. ``limit``: the share above
    which it warns. ``says``: what is short, in words."""

    name: str
    kind: FindingKind
    used: Callable[[HostSample], float | None]
    limit: Callable[[Policies], float]
    says: Callable[[HostSample], str]
    fix: str
    subject: str = ""


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if whole and part is not None else None


def _gib(size: int | None) -> str:
    return f"{(size or 0) / GIB:.1f}"


LIMITS = (
    Limit(
        "files", FindingKind.FILES_LOW,
        lambda host: max((use.open_files / use.limit for use in host.files), default=None),
        lambda policies: policies.resources.files_above,
        lambda host: f"{host.files[0].name} (pid {host.files[0].pid}) has {host.files[0].open_files} of"
        f" {host.files[0].limit} files open",
        "set [trainer] nofile = 65536 to raise the limit at the next start; if the number only grows, a process leaks"
        " open files",
    ),
    Limit(
        "host", FindingKind.MEMORY_LOW,
        lambda host: _share(host.memory_total_bytes - host.memory_available_bytes, host.memory_total_bytes),
        lambda policies: policies.resources.memory_above,
        lambda host: f"the machine has {_gib(host.memory_available_bytes)} of {host.memory_total_bytes / GIB:.0f}"
        " GiB of memory left",
        "the kernel kills the biggest process when memory runs out: use fewer workers, smaller buffers, or a bigger"
        " pod",
        "host",
    ),
    Limit(
        "container", FindingKind.MEMORY_LOW,
        lambda host: _share(host.cgroup_used_bytes, host.cgroup_limit_bytes),
        lambda policies: policies.resources.memory_above,
        lambda host: f"the container uses {_gib(host.cgroup_used_bytes)} of {_gib(host.cgroup_limit_bytes)} GiB of"
        " memory (without page cache)",
        "the kernel kills a process of the container at the limit: use fewer workers, smaller buffers, or a bigger"
        " limit",
        "container",
    ),
    Limit(
        "shm", FindingKind.SHM_LOW,
        lambda host: _share(host.shm_used_bytes, host.shm_total_bytes),
        lambda policies: policies.resources.shm_above,
        lambda host: f"/dev/shm is {_share(host.shm_used_bytes, host.shm_total_bytes) or 0:.0%} full"
        f" ({_gib(host.shm_used_bytes)} of {_gib(host.shm_total_bytes)} GiB)",
        "NCCL and vLLM die with a bus error when it is full: enlarge it (docker --shm-size), or delete the files of"
        " earlier starts (/dev/shm/vllm-*, /dev/shm/nccl-*)",
    ),
)  # fmt: skip


def resources(turn: Turn) -> Iterator[Finding]:
    """Each limit of the machine that is nearly reached, and processes that were killed for memory."""
    yield from _disk(turn)
    reading, machine = turn.snapshot.host, turn.machine
    host = reading.value if reading.ok else None
    if host is None:
        return
    for row in LIMITS:
        used, limit = row.used(host), row.limit(turn.policies)
        if reading.at != machine.host_at:
            machine.alarms[row.name] = machine.alarms.get(row.name, Alarm()).observe(
                None if used is None else used > limit, reading.at, hold=HOLD_SECONDS,
                clear=None if used is None else used < limit - CLEAR_BELOW, release=RELEASE_SECONDS,
            )  # fmt: skip
        alarm = machine.alarms[row.name]
        if alarm.raised and used is not None:
            yield _near(row, host, used, limit, turn.at, alarm.since if alarm.since is not None else turn.at)
    if reading.at != machine.host_at:
        _count_kills(machine, host, reading.at)
    machine.host_at = reading.at
    yield from _killed(machine, turn.at)


def _near(row: Limit, host: HostSample, used: float, limit: float, at: float, since: float) -> Finding:
    shown = Evidence(
        row.subject or str(row.kind), f"{used:.3f} used (warns above {limit:g})", Agreement.AGREES, at - since
    )  # fmt: skip
    severity = Severity.CRITICAL if used > max(limit, CRITICAL_ABOVE) else Severity.WARNING
    return Finding(row.kind, severity, row.says(host), since, row.fix, evidence=(shown,), subject=row.subject)


def _count_kills(machine: Machine, host: HostSample, at: float) -> None:
    """OOM kills in the trainer's cgroup since the last reading."""
    if host.oom_kills is None:
        return
    grown = 0 if machine.ooms is None else host.oom_kills - machine.ooms
    # A lower number is the counter of a new cgroup (training was restarted): all its kills are new.
    grown = host.oom_kills if grown < 0 else grown
    if machine.killed_at is not None and at - machine.killed_at >= OOM_SHOWN_SECONDS:
        machine.killed = 0
    machine.ooms, machine.killed = host.oom_kills, machine.killed + grown
    machine.killed_at = at if grown else machine.killed_at


def _killed(machine: Machine, at: float) -> Iterator[Finding]:
    if machine.killed and machine.killed_at is not None and at - machine.killed_at < OOM_SHOWN_SECONDS:
        yield Finding(
            FindingKind.OUT_OF_MEMORY,
            Severity.CRITICAL,
            f"the kernel killed {machine.killed} process{'es' if machine.killed > 1 else ''} because memory ran out in"
            " the trainer's cgroup",
            machine.killed_at,
            suggestion="use a bigger pod, fewer workers, or less of /dev/shm; `dmesg` names the process, if readable",
            evidence=(Evidence("oom kills", str(machine.killed), Agreement.AGREES, at - machine.killed_at),),
        )


def _disk(turn: Turn) -> Iterator[Finding]:
    reading, above = turn.snapshot.disk, turn.policies.disk.prune_above
    disk = reading.value if reading.ok else None
    if disk is None:
        return
    if disk.used_ratio > above:
        yield Finding(
            FindingKind.DISK_HIGH,
            Severity.WARNING,
            f"{disk.path} is {disk.used_ratio:.0%} full (podwatch deletes old checkpoints above {above:.0%})",
            reading.at,
            suggestion="`podwatch prune --dry-run` shows what podwatch can delete",
            evidence=(Evidence("disk", f"{disk.used_ratio:.3f} used", Agreement.AGREES),),
        )
    if disk.inodes_total > 0 and disk.inodes_free / disk.inodes_total < INODES_BELOW:
        yield Finding(
            FindingKind.INODES_LOW,
            Severity.WARNING,
            f"{disk.path} has {disk.inodes_free} of {disk.inodes_total} inodes left",
            reading.at,
            suggestion="delete small files that you do not need; rollouts and broadcasts are usually the most",
            evidence=(Evidence("inodes", f"{disk.inodes_free} free", Agreement.AGREES),),
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
    """XIDs, uncorrected ECC errors, and clocks throttled by heat or power."""
    policy, host, gpus, machine = turn.policies.gpu, turn.snapshot.host, turn.snapshot.gpus, turn.machine
    mine = {*policy.inference, *policy.trainer}
    if host.ok and host.value is not None:
        yield from _xids(host.value.xids, mine, turn.at)
    if gpus.ok and gpus.value is not None:
        for gpu in gpus.value:
            if not mine or gpu.index in mine:
                if gpus.at != machine.gpus_at:
                    _observe_gpu(machine, gpu, gpus.at)
                yield from _throttled(machine, gpu, turn.at)
        machine.gpus_at = gpus.at
    yield from _ecc(machine, turn.at)


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


def _observe_gpu(machine: Machine, gpu: GpuSample, at: float) -> None:
    name = f"throttled{gpu.index}"
    machine.alarms[name] = machine.alarms.get(name, Alarm()).observe(
        bool(gpu.throttled), at, hold=THROTTLED_SECONDS, release=UNTHROTTLED_SECONDS
    )  # fmt: skip
    if gpu.ecc_uncorrected is None:
        return
    before = machine.ecc.get(gpu.index)
    machine.ecc[gpu.index] = gpu.ecc_uncorrected
    # Errors from before podwatch started, or a counter reset by a driver reload, are not new errors of this run.
    if before is not None and gpu.ecc_uncorrected > before:
        errors, _ = machine.ecc_grown.get(gpu.index, (0, at))
        machine.ecc_grown[gpu.index] = (errors + gpu.ecc_uncorrected - before, at)


def _throttled(machine: Machine, gpu: GpuSample, at: float) -> Iterator[Finding]:
    alarm = machine.alarms.get(f"throttled{gpu.index}", Alarm())
    if not alarm.raised or alarm.since is None:
        return
    why = " and ".join(WORDS.get(reason, reason) for reason in gpu.throttled) or "an intermittent fault"
    warm = f" ({gpu.temperature_celsius:.0f} degrees Celsius)" if gpu.temperature_celsius is not None else ""
    clocks = Evidence(f"gpu{gpu.index} clocks", ", ".join(gpu.throttled), Agreement.AGREES, at - alarm.since)
    yield Finding(
        FindingKind.GPU_THROTTLED,
        Severity.WARNING,
        f"GPU {gpu.index} has been throttled by {why} for {(at - alarm.since) / 60:.0f} minutes{warm}, so training is"
        " slower",
        alarm.since,
        suggestion="report it to the provider of the machine, or move to another machine",
        evidence=(clocks,),
        subject=f"gpu{gpu.index}",
    )


def _ecc(machine: Machine, at: float) -> Iterator[Finding]:
    for index, (errors, when) in list(machine.ecc_grown.items()):
        if at - when > ECC_SHOWN_SECONDS:
            del machine.ecc_grown[index]
            continue
        yield Finding(
            FindingKind.GPU_FAULT,
            Severity.CRITICAL,
            f"GPU {index} had {errors} uncorrected memory error{'s' if errors > 1 else ''} since podwatch started",
            when,
            suggestion=meaning(48).fix,
            evidence=(Evidence(f"gpu{index} ecc", f"{errors} uncorrected", Agreement.AGREES, at - when),),
            subject=f"gpu{index}-ecc",
        )
