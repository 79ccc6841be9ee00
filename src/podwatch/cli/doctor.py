"""The checks behind ``podwatch check``: each looks at one thing and says ok, warn or fail, with the fix.

Nothing here changes anything, except that probe objects are written and removed: beside output_dir, and with
``throughput`` in the store; with ``send_notice`` a notice goes out. The families are in ``podwatch.cli.doctoring``.
"""

from collections.abc import Callable, Iterator

from podwatch.cli.doctoring import leftovers, machine, places, start, telling
from podwatch.cli.doctoring.common import Line, sets_of
from podwatch.cli.doctoring.gpus import gpus
from podwatch.cli.doctoring.other_tools import other_tools
from podwatch.cli.doctoring.store import store
from podwatch.config.settings import Settings
from podwatch.domain.errors import PodwatchError

__all__ = ["Line", "examine"]


def examine(
    settings: Settings, *, throughput: bool = False, verbose: bool = False, send_notice: bool = False
) -> Iterator[Line]:
    """Every check in the order a person would repair things. One that cannot look says so and stops none."""
    now, sets = leftovers.running(settings), sets_of(settings)
    checks: dict[str, Callable[[], Iterator[Line]]] = {
        "output_dir": lambda: places.output_dir(settings),
        "directories": lambda: places.own_directory(settings),
        "state_dir": lambda: places.state_dir(settings),
        "layout": lambda: start.layout(settings, sets),
        "command": lambda: start.command(settings),
        "wandb": lambda: start.keys(settings),
        "vllm": lambda: start.vllm(settings),
        "packages": lambda: start.packages(settings),
        "gpu": lambda: gpus(settings, now),
        "supervise": lambda: leftovers.supervise(settings, now),
        "leftovers": lambda: leftovers.leftovers(settings, now),
        "other tools": lambda: other_tools(settings),
        "steps": lambda: leftovers.ahead(settings, now, sets),
        "ports": lambda: machine.ports(settings, now),
        "signals": lambda: machine.signals(settings),
        "disk": lambda: places.disk(settings, sets),
        "files": lambda: places.files(settings),
        "store": lambda: store(settings, throughput, sets),
        "nofile": lambda: machine.limits(settings),
        "http": lambda: machine.http(settings),
        "notify": lambda: telling.notify(settings, send=send_notice),
        "wandb run": lambda: telling.own_wandb(settings, send=send_notice),
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
            yield Line(name, "fail", "the file system does not answer", "look at its mount (NFS, FUSE) and at dmesg")
        except OSError as error:
            yield Line(name, "fail", f"cannot look: {error}", "check the path and its permissions")
