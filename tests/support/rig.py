"""One pod for an end-to-end test: a real ``podwatch run``, the NVML stand-in, and a fake trainer that obeys orders."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from tests.support import own_times, processes
from tests.support.creations import Creations, names_below, noted
from tests.support.daemon import DaemonProcess
from tests.support.nvml import GIB, NvmlWorld
from tests.support.processes import alive

TRAINER = Path(__file__).with_name("fake_trainer.py")


def end_all(members: Callable[[], Collection[int]], within: float = 60.0) -> None:
    """SIGKILL until none of them is left, for so many seconds."""
    end = time.monotonic() + within
    while (left := members()) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def naming(root: Path) -> list[int]:
    """Living processes with a path below ``root`` in their command; never our own."""
    return [pid for pid in _others() if any(str(root) in word for word in processes.command(pid))]


def members_of(run_id: str, root: Path) -> list[int]:
    """Living processes that carry this run's mark, or name a path below ``root`` in their command; never our own."""
    marked = [pid for pid in _others() if processes.environment_value(pid, "PODWATCH_RUN") == run_id]
    return [*marked, *naming(root)]


def _others() -> list[int]:
    return [pid for pid in processes.all_pids() if pid != os.getpid() and alive(pid)]


class Cards(threading.Thread):
    """Shows on GPU 0 what the engine or an evaluation would hold, and on GPU 1 what the trainer would hold, while they
    live."""

    def __init__(self, world: NvmlWorld, control: Path) -> None:
        super().__init__(daemon=True)
        self._world, self._control, self._ended = world, control, threading.Event()
        self._shown = [-1, -1]

    def run(self) -> None:
        while not self._ended.wait(0.05):
            for index, holders in enumerate((("engine", "evaluation"), ("trainer",))):
                used = 60 * GIB if any(map(self._lives, holders)) else 0
                if used != self._shown[index]:
                    self._shown[index] = used
                    self._world.set_memory(index, used)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _lives(self, what: str) -> bool:
        try:
            return alive(int((self._control / f"{what}.pid").read_text()))
        except (OSError, ValueError):
            return False


class Rig:
    """``daemon`` is not started yet. ``settings`` are TOML tables merged over quick ones."""

    supervise = "start"
    """podwatch attaches to nothing; the fixture ``attaching`` is for tests of that."""

    def __init__(self, root: Path, library: Path) -> None:
        self.root = root
        self.output = root / "work" / "outputs"
        self.control = root / "control"
        self.times = root / "test-times.toml"
        self.control.mkdir(parents=True)
        self.output.parent.mkdir(parents=True)
        self.run_id = f"e2e-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.world = NvmlWorld(root / "world", devices=2)
        self.cards = Cards(self.world, self.control)
        self.trainer_flags: list[str] = []
        self._library = library
        self._creations = Creations(self.output, root / "made-by-test")
        self._not_ours: set[str] = set()
        self._daemons: list[DaemonProcess] = []
        self.cards.start()

    # -- configuration

    def command(self) -> list[str]:
        where = ["--output-dir", str(self.output), "--control", str(self.control)]
        return [sys.executable, "-S", str(TRAINER), *where, *self.trainer_flags]

    def config(self, **changes: Any) -> str:
        """The configuration; podwatch's own times go into the file of times instead. Keys are ``section__key`` (or a
        top-level key); a value of None removes the key."""
        tables: dict[str, dict[str, Any]] = {
            "": {"run_id": self.run_id, "state_dir": str(self.root / "state")},
            "trainer": {
                "layout": "prime-rl", "output_dir": str(self.output), "cwd": str(self.output.parent),
                "command": self.command(), "supervise": self.supervise, "stop_grace": "2s", "save_grace": "2s",
                "nofile": 1024,  # a machine for tests may not allow the default, and podwatch says so
            },
            "gpu": {"inference": [0], "trainer": [1], "poll": "0.1s", "hold": "0.5s", "deadline": "0.5s"},
            "checkpoints": {"rescan": "0.3s", "settle": "0.2s"},
            "recovery": {"backoff_min": "0.1s", "backoff_max": "0.5s"},
            "disk": {"prune_above": 0.999, "prune_to": 0.99},  # the fullness of this machine is no subject of a test
            "sync": {"claim_wait": "1s"},
            "http": {"port": 0},
            "log": {"format": "json"},
        }  # fmt: skip
        for name, value in changes.items():
            section, _, key = name.rpartition("__")
            table = tables.setdefault(section, {})
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        lines = []
        for section, table in tables.items():
            lines += [f"[{section}]"] if section else []
            lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        config, times = own_times.split("\n".join(lines))
        own_times.write(times, self.times)
        return config

    def daemon(self, environ: dict[str, str] | None = None, **changes: Any) -> DaemonProcess:
        times = {own_times.VARIABLE: str(self.times)}
        variables = {**self.world.environment(self._library), **times, **(environ or {})}
        if not self._daemons:
            self._not_ours |= names_below(self.output)
        made = DaemonProcess(self.root, self.config(**changes), variables)
        self._daemons.append(made)
        return made

    def start_by_hand(self) -> None:
        """As from a shell that is gone: prime-rl's launcher by its name, with a file of a checkpoint open for
        writing."""
        launcher = self.root / "rl"
        run = f"import runpy\nrunpy.run_path({str(TRAINER)!r}, run_name='__main__')\n"
        launcher.write_text(f"#!{sys.executable} -S\n{run}")
        launcher.chmod(0o755)
        (self.output / "logs").mkdir(parents=True, exist_ok=True)
        (self.output / "checkpoints").mkdir(exist_ok=True)
        words = shlex.join([str(launcher), *self.command()[3:]])
        log, part = self.output / "logs" / "rl.log", self.output / "checkpoints" / ".step_0.part"
        self.made_by_others(log, part)
        script = f"setsid {words} >> {log} 2>&1 < /dev/null 9> {part} &"
        subprocess.run(["sh", "-c", script], check=True, cwd=self.output.parent)

    # -- orders and looks

    def order(self, **order: Any) -> None:
        path = self.control / "orders.json"
        path.with_suffix(".new").write_text(json.dumps(order))
        path.with_suffix(".new").replace(path)

    def obey(self) -> None:
        """No orders any more."""
        (self.control / "orders.json").unlink(missing_ok=True)

    @property
    def starts(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in (self.control / "starts.jsonl").read_text().splitlines()]
        except OSError:
            return []

    @property
    def trainer_pid(self) -> int:
        """0 while none lives."""
        return self._living("trainer")

    @property
    def engine_pid(self) -> int:
        return self._living("engine")

    def kill(self, what: str) -> None:
        """SIGKILL for the ``trainer`` or the ``engine``, which must live: to send it to 0 would end our own group."""
        pid = self._living(what)
        assert pid > 0, f"no {what} lives"
        os.kill(pid, signal.SIGKILL)

    def _living(self, what: str) -> int:
        try:
            pid = int((self.control / f"{what}.pid").read_text())
        except (OSError, ValueError):
            return 0
        return pid if alive(pid) else 0

    def never_two(self) -> None:
        double = self.control / "double"
        assert not double.exists(), f"two were alive at once: {double.read_text()}"

    def made_by_others(self, *paths: Path) -> None:
        """Names below output_dir that a program makes which notes nothing: neither the fake trainer nor this test."""
        self._not_ours |= {str(path.relative_to(self.output)) for path in paths}

    def nothing_of_podwatch(self) -> None:
        """Promise 8: each name below output_dir was made by a trainer, by this test, or before the first podwatch came.
        A restored checkpoint has the names that the trainer gave it, on this pod or on another pod of the test; what
        lies in quarantine, trash and staging is not below output_dir. Only where output_dir is a mount of its own,
        out of which nothing can be renamed, they are in its ``.podwatch``."""
        names = names_below(self.output) - self._not_ours
        pods = self.root.parent
        for notes in (*pods.glob("*/made-by-test"), *pods.glob("*/*/made-by-trainer")):
            names -= noted(notes)
        if self.output.is_mount():
            names = {name for name in names if name.partition("/")[0] != ".podwatch"}
        assert not names, f"below output_dir, and made by no trainer: {sorted(names)}"

    @property
    def saved(self) -> list[int]:
        """Steps whose trainer part has its marker."""
        return sorted(int(p.parts[-3][5:]) for p in self.output.glob("checkpoints/step_*/trainer/.metadata"))

    def members(self) -> list[int]:
        """Everything that was started for this run: trainer, engine, supervisor."""
        return members_of(self.run_id, self.root)

    def close(self) -> None:
        """End everything, and hold every test to what must be true whatever it did."""
        for daemon in self._daemons:
            if daemon.process is not None and daemon.process.poll() is None:
                daemon.process.kill()
                daemon.process.wait()
        end_all(self.members)
        self.cards.stop()
        self._creations.stop()
        self.never_two()
        self.nothing_of_podwatch()
        for daemon in self._daemons:
            if daemon.log.exists():
                assert "Traceback" not in daemon.log.read_text(errors="replace"), daemon.tail(80)
