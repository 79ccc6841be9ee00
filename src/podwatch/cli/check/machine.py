"""Check the machine: GPUs, limits, ports, podwatch's service manager, and the available corroborating signals."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from podwatch.checkpoints.trainers import process_names
from podwatch.cli import detect_machine
from podwatch.cli.check.report import Level, Line, failed
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError
from podwatch.domain.times import gib
from podwatch.recovery.gpus_and_ports_free import port_taken
from podwatch.trainer.find import read_pod, sought_run
from podwatch.trainer.process_roles import Roles
from podwatch.trainer.rules import gpu_holders

# -- GPUs: present, and free before a start --------------------------------------------------------------------------


def gpus(settings: Settings, running: str) -> Iterator[Line]:
    """``running``: the running training as text; empty if there is none."""
    inference, trainer = settings.gpu.inference, settings.gpu.trainer
    wanted = sorted({*inference, *trainer})
    if not inference:
        fix = "set [gpu] inference to the GPUs that hold the inference engine"
        yield Line("gpu", "warn", "no inference GPU configured: podwatch cannot detect a silent death by memory", fix)
    elif both := sorted({*inference} & {*trainer}):
        text = f"inference and trainer share GPU {', '.join(map(str, both))}: podwatch learns its usual memory"
        yield Line("gpu", "ok", text)
    try:
        devices = {gpu.index: gpu for gpu in detect_machine.read_gpus()}
    except TimeoutError:
        yield Line("gpu", "fail", "NVML does not answer: the driver hangs", "read dmesg; if that fails, reboot the pod")
        return
    except Exception as error:
        fix = "install the NVIDIA driver, or run podwatch on the GPU machine; it needs NVML to detect a silent death"
        yield Line("gpu", "fail" if wanted else "warn", f"cannot use NVML: {error}", fix)
        return
    for index in wanted:
        if index not in devices:
            known = ", ".join(map(str, devices)) or "none"
            yield Line("gpu", "fail", f"GPU {index} of [gpu] not found (this machine has: {known})", "correct [gpu]")
    for index, gpu in devices.items():
        used = gpu.memory_used_bytes
        if gpu.detail or used is None:
            fix = "check whether nvidia-smi shows its memory; podwatch needs it to detect a silent death"
            problem = gpu.detail or "its memory cannot be read"
            yield Line("gpu", "fail" if index in wanted else "warn", f"GPU {index}: {gpu.name}, {problem}", fix)
            continue
        text = f"GPU {index}: {gpu.name}, {gib(used)} of {gib(gpu.memory_total_bytes)} used"
        if running or (wanted and index not in wanted) or used <= settings.gpu.release_margin:
            yield Line("gpu", "ok", text)
        else:
            # The same threshold as recovery before a start.
            holders = "; ".join(_holders(settings)) or "podwatch can read no process that has a context there"
            fix = f"end the process that holds it ({holders}); a start waits until it is free"
            level: Level = "fail" if wanted else "warn"
            yield Line("gpu", level, f"{text}, but this run's training is not running", fix)


def _holders(settings: Settings) -> tuple[str, ...]:
    """As text, the processes with a CUDA context on the run's GPUs. In a container NVML reports the host's pids."""
    run = sought_run(settings)
    return gpu_holders(read_pod(run, Roles(process_names())), run)


# -- limits, ports, signals, service manager -------------------------------------------------------------------------

_CAP_SYS_PTRACE = 19
_SIGTERM_BIT = 1 << (15 - 1)


def limits(settings: Settings) -> Iterator[Line]:
    """The open-file limit that training would get, tried."""
    wanted = settings.trainer.nofile
    got = _tried(wanted)
    by_systemd = os.geteuid() == 0 and Path("/run/systemd/system").is_dir()
    if got < wanted and not by_systemd:
        fix = (
            f"raise the hard limit where the pod is started (docker run --ulimit nofile={wanted}:{wanted},"
            f" LimitNOFILE={wanted} in the unit), or lower trainer.nofile"
        )
        yield Line("nofile", "fail", f"training needs {wanted} open files but gets only {got}", fix)
    elif wanted < 65_536:
        yield Line("nofile", "warn", f"training gets {wanted} open files; vLLM wants 65,536", "raise trainer.nofile")
    elif got < wanted:
        yield Line("nofile", "ok", f"{wanted} open files: systemd sets the limit for the unit (this shell has {got})")
    else:
        yield Line("nofile", "ok", f"training gets {wanted} open files")


def _tried(wanted: int) -> int:
    """The soft limit that the supervisor can set, tried on this process and taken back."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    except (OSError, ValueError):
        return min(wanted, hard)
    return wanted


def http(settings: Settings) -> Iterator[Line]:
    if not settings.http.enabled:
        yield Line("http", "warn", "off: no /healthz, no metrics, no progress pings", "set [http] enabled = true")
        return
    from podwatch.api.http_access import beyond_loopback
    from podwatch.api.http_server import bind
    from podwatch.app.settings_in_force import http_password

    listener = bind(settings.http.host, settings.http.port)
    got = int(listener.getsockname()[1])
    listener.close()
    try:
        password = http_password(settings.http)
    except PodwatchError as error:
        yield failed("http", error)
        return
    if not password and beyond_loopback(settings.http.host):
        text = f"{settings.http.host} without a password: only probes and progress pings are answered"
        yield Line("http", "warn", text, "set [http] password_file (docs/page.md)")
    if settings.http.port in (0, got):
        yield Line("http", "ok", f"{settings.http.host}:{got} is free")
    else:
        text = f"port {settings.http.port} is in use; podwatch would use {got}"
        yield Line("http", "warn", text, "nothing if a running podwatch uses it; else set [http] port")


def ports(settings: Settings, now: str) -> Iterator[Line]:
    """The inference servers' ports on this machine: with a leftover server, the next one fails to bind."""
    parts = [urlsplit(url) for url in settings.inference.urls]
    local = [p.port for p in parts if p.hostname in ("127.0.0.1", "localhost", "::1") and p.port]
    for port in dict.fromkeys(local):
        if now or not port_taken(port):
            yield Line("ports", "ok", f"port {port} " + ("is used by running training" if now else "is free"))
        else:
            fix = f"end the process that listens there (ss -ltnp 'sport = :{port}'); a start waits until it is free"
            yield Line("ports", "fail", f"port {port} is in use, but this run's training is not running", fix)


def signals(settings: Settings) -> Iterator[Line]:
    """The corroborating signals of this pod. Without one podwatch does not restart training."""
    seen = ["the trainer's exit", "step lines and checkpoints", "the inference server's health"]
    if settings.http.enabled:
        seen.append("progress pings")
    if _may_see_contexts(settings):
        seen.append("CUDA contexts")
        yield Line("signals", "ok", f"signals that can corroborate a death: {', '.join(seen)}")
    else:
        fix = "run podwatch as root, as training's user, or as a service with CAP_SYS_PTRACE"
        text = f"podwatch cannot see CUDA contexts of training; other corroborating signals: {', '.join(seen)}"
        yield Line("signals", "warn", text, fix)


def _may_see_contexts(settings: Settings) -> bool:
    """Whether CUDA contexts of training are visible: of another user's processes only with CAP_SYS_PTRACE."""
    capable = bool(_mask(Path("/proc/self/status"), "CapEff") >> _CAP_SYS_PTRACE & 1)
    return capable or not settings.trainer.user


def _mask(status: Path, name: str) -> int:
    """A set of bits in a process's status file. OSError."""
    lines = (line.partition(":") for line in status.read_text().splitlines())
    return next((int(value, 16) for field, _, value in lines if field == name), 0)


def host(settings: Settings) -> Iterator[Line]:
    if Path("/run/systemd/system").is_dir():
        yield Line("systemd", "ok", "available: podwatch can run as a service")
        return
    fix = "use `podwatch run --detach`, or make `podwatch run` the container's command"
    yield Line("systemd", "warn", "not available (a container?)", fix)
    if not _handles_sigterm():
        text = "PID 1 ignores SIGTERM: podwatch gets no preemption notice when this container is stopped"
        fix = "make `podwatch run` the container's command, or call `podwatch preempt` from the provider's hook"
        yield Line("preemption", "warn", text, fix)


def _handles_sigterm() -> bool:
    """Whether PID 1 has a SIGTERM handler: without one the kernel drops the signal for PID 1."""
    try:
        return bool(_mask(Path("/proc/1/status"), "SigCgt") & _SIGTERM_BIT)
    except OSError:
        return True
