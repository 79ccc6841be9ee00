"""The checks behind ``podwatch check``: each looks at one thing and says ok, warn or fail, with the fix.

Nothing here changes anything, except that the store's own ``check`` may write and remove a probe object.
"""

import importlib.util
import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from podwatch.client.times import gib, size
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError

T = TypeVar("T")
DEADLINE_SECONDS = 20.0
"""For calls that can hang: NVML, the store, a network file system."""


@dataclass(frozen=True, slots=True)
class Line:
    """One result. ``level`` is ok, warn or fail; ``fix`` is empty for ok."""

    name: str
    level: str
    text: str
    fix: str = ""


def examine(settings: Settings) -> Iterator[Line]:
    """Every check in the order a person would repair things."""
    for name, check in _CHECKS.items():
        try:
            yield from check(settings)
        except PodwatchError as error:
            yield Line(name, "fail", f"{error.what}{f' ({error.where})' if error.where else ''}", error.fix)
        except OSError as error:
            yield Line(name, "fail", f"cannot look: {error}", "check the path and its permissions")


def _output_dir(settings: Settings) -> Iterator[Line]:
    path = settings.trainer.output_dir
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir():
        yield Line("output_dir", "fail", f"{nearest} is not a directory", "correct trainer.output_dir")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Line("output_dir", "fail", f"{nearest} is not writable", "run podwatch as its owner, or as root")
    elif nearest != path:
        yield Line("output_dir", "ok", f"{path} does not exist yet; {nearest} is writable")
    else:
        yield Line("output_dir", "ok", str(path))


def _state_dir(settings: Settings) -> Iterator[Line]:
    path = settings.state_dir
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        yield Line("state_dir", "ok", str(path))
    else:
        yield Line("state_dir", "fail", f"{nearest} is not writable", "set state_dir to a directory on local disk")


def _command(settings: Settings) -> Iterator[Line]:
    trainer = settings.trainer
    if not trainer.command:
        level = "ok" if trainer.supervise == "attach" else "warn"
        yield Line("command", level, "none: podwatch can watch a trainer but not start one", "set trainer.command")
        return
    cwd = trainer.cwd or trainer.output_dir.parent
    if not cwd.is_dir():
        yield Line("command", "fail", f"its directory {cwd} does not exist", "correct trainer.cwd")
        return
    program = trainer.command[0]
    search = trainer.env.get("PATH") or os.environ.get("PATH")
    found = shutil.which(str(cwd / program) if "/" in program else program, path=search)
    if found is None:
        yield Line("command", "fail", f"{program} is not found", "use an absolute path, or set PATH in trainer.env")
        return
    yield Line("command", "ok", f"{found}, in {cwd}")
    script = trainer.command[2] if len(trainer.command) > 2 and trainer.command[1] == "-c" else ""
    if "|" in script.replace("||", "") and "pipefail" not in script:
        yield Line("command", "warn", "a pipe hides the exit code of a crash", "begin the script with set -o pipefail")


def _gpus(settings: Settings) -> Iterator[Line]:
    wanted = sorted({*settings.gpu.inference, *settings.gpu.trainer})
    missing_level = "fail" if wanted else "warn"
    try:
        devices = _in_time(_read_gpus)
    except TimeoutError:
        yield Line("gpu", "fail", "NVML does not answer", "the driver hangs: look at dmesg; the pod may need a reboot")
        return
    except Exception as error:
        fix = "install the NVIDIA driver, or run where the GPUs are; without NVML a silent death cannot be seen"
        yield Line("gpu", missing_level, f"NVML cannot be used: {error}", fix)
        return
    for index in wanted:
        if index not in devices:
            known = ", ".join(map(str, devices)) or "none"
            yield Line("gpu", "fail", f"GPU {index} is configured but not here (here: {known})", "correct [gpu]")
    for index, text in devices.items():
        yield Line("gpu", "ok", f"GPU {index}: {text}")
    if devices and not settings.gpu.inference:
        fix = "set gpu.inference to the GPUs that hold the inference engine"
        yield Line("gpu", "warn", "no inference GPU is named: silent death by memory is not watched", fix)


def _read_gpus() -> dict[int, str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        devices = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            devices[index] = f"{pynvml.nvmlDeviceGetName(handle)}, {gib(memory.used)} of {gib(memory.total)} used"
        return devices
    finally:
        pynvml.nvmlShutdown()


def _disk(settings: Settings) -> Iterator[Line]:
    from podwatch.cli.offline import look
    from podwatch.domain.checkpoint import newest_complete

    path = settings.trainer.output_dir
    nearest = next(p for p in (path, *path.parents) if p.exists())
    usage = _in_time(lambda: shutil.disk_usage(nearest))
    sets = _in_time(lambda: look(settings)).sets
    capacity, free = usage.total, usage.free
    if settings.disk.capacity:
        # as the disk sensor: what statvfs says of the whole disk means nothing then, what lies there of ours does
        capacity = settings.disk.capacity
        free = max(0, min(free, capacity - sum(found.size_bytes for found in sets)))
    ratio = 1 - free / capacity if capacity else 0.0
    level = "warn" if ratio >= settings.disk.prune_above else "ok"
    fix = f"above {settings.disk.prune_above:.0%} podwatch prunes" if level == "warn" else ""
    yield Line("disk", level, f"{ratio:.0%} of {size(capacity)} used, {size(free)} free", fix)
    newest = newest_complete(sets)
    if newest is None:
        yield Line("disk", "ok", "the size of a save is not known yet")
        return
    last = newest.size_bytes
    need = int(last * settings.disk.margin)
    if capacity < 2 * need:
        text = f"the disk ({size(capacity)}) holds one set only: a set is {size(last)}, with margin {size(need)}"
        yield Line("disk", "fail", text, "a save is written while the one before must stay: use a bigger disk")
    elif free < need:
        yield Line(
            "disk", "warn", f"the next save needs {size(need)}, {size(free)} are free", "podwatch prune --dry-run"
        )
    else:
        yield Line("disk", "ok", f"the next save ({size(need)} with margin) fits")


def _store(settings: Settings) -> Iterator[Line]:
    from podwatch.stores.credentials import credentials_from_environment
    from podwatch.stores.open import open_store, same_filesystem

    url = settings.sync.store
    if not url:
        yield Line("store", "warn", "NOT BACKED UP: no store is configured", "set [sync] store to b2://bucket")
        return
    if same_filesystem(url, settings.trainer.output_dir):
        yield Line("store", "fail", f"{url} is on output_dir's own filesystem", "a backup needs another disk, or b2://")
        return
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    credentials = credentials_from_environment(
        os.environ, settings.trainer.env_file, Path(directory) if directory else None
    )
    store = open_store(url, credentials, writer_id="check")
    try:
        warnings = _in_time(store.check, seconds=60.0)
    except TimeoutError:
        yield Line("store", "fail", f"{store.url} does not answer", "check the network; podwatch goes on without it")
        return
    finally:
        store.close()
    yield Line("store", "ok", f"{store.url} can be used")
    for warning in warnings:
        yield Line("store", "warn", warning, "see docs/sync.md")


def _limits(settings: Settings) -> Iterator[Line]:
    wanted = settings.trainer.nofile
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < wanted and os.geteuid() != 0:
        fix = f"raise the hard limit (LimitNOFILE={wanted}, or ulimit -Hn {wanted} as root)"
        yield Line("nofile", "fail", f"training needs {wanted} open files, the hard limit is {hard}", fix)
    else:
        yield Line("nofile", "ok", f"{wanted} open files can be given to training")


def _port(settings: Settings) -> Iterator[Line]:
    if not settings.http.enabled:
        yield Line("http", "warn", "off: no /healthz, no metrics, no progress pings", "set [http] enabled = true")
        return
    from podwatch.telling.server import bind

    listener = bind(settings.http.host, settings.http.port)
    got = int(listener.getsockname()[1])
    listener.close()
    if settings.http.port in (0, got):
        yield Line("http", "ok", f"{settings.http.host}:{got} is free")
    else:
        text = f"port {settings.http.port} is taken; {got} would be used"
        yield Line("http", "warn", text, "fine if podwatch itself holds it; else set [http] port")


def _host(settings: Settings) -> Iterator[Line]:
    if Path("/run/systemd/system").is_dir():
        yield Line("systemd", "ok", "present: podwatch can be a service")
    else:
        fix = "use `podwatch run --detach`, or make `podwatch run` the container's command"
        yield Line("systemd", "warn", "not present (a container?)", fix)
    shared = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is not None]
    if shared:
        text = f"podwatch shares its packages with {' and '.join(shared)}"
        yield Line("packages", "warn", text, "install it apart: uv tool install podwatch, or pipx")


def _in_time(function: Callable[[], T], *, seconds: float = DEADLINE_SECONDS) -> T:
    """The result of a call that may hang, from a daemon thread that is left behind if it does. TimeoutError."""
    box: dict[str, Any] = {}

    def call() -> None:
        try:
            box["result"] = function()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    if "error" in box:
        raise box["error"]
    result: T = box["result"]
    return result


_CHECKS: dict[str, Callable[[Settings], Iterator[Line]]] = {
    "output_dir": _output_dir,
    "state_dir": _state_dir,
    "command": _command,
    "gpu": _gpus,
    "disk": _disk,
    "store": _store,
    "nofile": _limits,
    "http": _port,
    "host": _host,
}
