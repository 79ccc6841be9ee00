"""The checks of ``podwatch check``: each examines one thing and yields ok, warn or fail, with the fix.

They change nothing, except for probe files beside output_dir, probe objects in the store (with ``throughput``), which
are deleted again, and a test notice (with ``send_notice``). The checks are in ``podwatch.cli.check.report``.
"""

from collections.abc import Callable, Iterator

from podwatch.cli.check import disk, leftovers, machine, notify, start
from podwatch.cli.check.leftovers import other_tools
from podwatch.cli.check.machine import gpus
from podwatch.cli.check.report import Line, sets_of
from podwatch.cli.check.store import store
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError

__all__ = ["Line", "examine"]


def examine(
    settings: Settings, *, throughput: bool = False, verbose: bool = False, send_notice: bool = False
) -> Iterator[Line]:
    """The results of every check, in the order in which an operator fixes things. A check that fails to run yields a
    result, too, and does not stop the others."""
    present, sets = leftovers.running(settings), sets_of(settings)
    now = present.text
    checks: dict[str, Callable[[], Iterator[Line]]] = {
        "output_dir": lambda: disk.output_dir(settings),
        "directories": lambda: disk.own_directory(settings),
        "state_dir": lambda: disk.state_dir(settings),
        "layout": lambda: start.layout(settings, sets),
        "command": lambda: start.command(settings),
        "wandb": lambda: start.keys(settings),
        "vllm": lambda: start.vllm(settings),
        "packages": lambda: start.packages(settings),
        "gpu": lambda: gpus(settings, now),
        "supervise": lambda: leftovers.supervise(settings, present),
        "leftovers": lambda: leftovers.leftovers(settings, now),
        "other tools": lambda: other_tools(settings),
        "steps": lambda: leftovers.ahead(settings, now, sets),
        "ports": lambda: machine.ports(settings, now),
        "signals": lambda: machine.signals(settings),
        "disk": lambda: disk.disk(settings, sets),
        "files": lambda: disk.files(settings),
        "store": lambda: store(settings, throughput, sets),
        "nofile": lambda: machine.limits(settings),
        "http": lambda: machine.http(settings),
        "notify": lambda: notify.notify(settings, send=send_notice),
        "wandb run": lambda: notify.own_wandb(settings, send=send_notice),
        "host": lambda: machine.host(settings),
        "pause": lambda: leftovers.remembered(settings, verbose),
    }
    told: set[str] = set()
    for name, check in checks.items():
        try:
            yield from check()
        except PodwatchError as error:
            if str(error) in told:
                continue  # several checks need the layout
            told.add(str(error))
            yield Line(name, "fail", f"{error.what}{f' ({error.where})' if error.where else ''}", error.fix)
        except TimeoutError:
            yield Line(name, "fail", "the file system does not answer", "check its mount (NFS, FUSE) and dmesg")
        except OSError as error:
            yield Line(name, "fail", f"cannot run this check: {error}", "check the path and its permissions")
