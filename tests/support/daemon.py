"""A real ``podwatch run`` as a child process, asked through its own runtime files and HTTP, as a person would."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import contract, own_times, warm

PATIENCE = float(os.environ.get("TESTS_PATIENCE", "3"))
"""Times what a wait takes at most on a machine that does nothing else. A machine of a gate does more than one thing."""


class DaemonProcess:
    """Start, ask, stop. ``directory`` holds the configuration, the times (``own_times``), the log and the runtime
    files."""

    def __init__(self, directory: Path, config: str, environ: Mapping[str, str] | None = None) -> None:
        self.directory = directory
        self.wrapper: tuple[str, ...] = ()
        """A command that is put before ``podwatch run``, such as setpriv."""
        directory.mkdir(parents=True, exist_ok=True)
        self.config = directory / "podwatch.toml"
        config, times = own_times.split(config)
        self.config.write_text(config)
        self.config.chmod(0o600)
        self.runtime = directory / "runtime"
        self.log = directory / "podwatch.log"
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("B2_", "PODWATCH_", "NOTIFY_"))},
            "PODWATCH_RUNTIME_DIR": str(self.runtime),
            "NO_COLOR": "1",
            **own_times.write(times, directory / "test-times.toml"),
            **(environ or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *flags: str) -> "DaemonProcess":
        command = [*self.wrapper, sys.executable, "-m", "podwatch", "-c", str(self.config), "run", *flags]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def command(self, *arguments: str, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Another podwatch command with the same configuration."""
        if arguments[0] != "run":
            done = warm.podwatch("-c", str(self.config), *arguments, env=self.environ, timeout=timeout)
            contract.check_printed(arguments, done.stdout)
            return done
        return subprocess.run(
            [sys.executable, "-m", "podwatch", "-c", str(self.config), *arguments],
            env=self.environ, capture_output=True, text=True, timeout=timeout,
        )  # fmt: skip

    def status(self) -> dict[str, Any] | None:
        """``/status``, or None while nothing answers."""
        try:
            endpoint = json.loads(next(self.runtime.glob("*/endpoint.json")).read_text())
            with urllib.request.urlopen(endpoint["http_url"] + "/status", timeout=5) as answer:
                document: dict[str, Any] = json.load(answer)
        except (OSError, StopIteration, ValueError, urllib.error.URLError):
            return None
        contract.check_status(document)
        return document

    def events(self) -> list[dict[str, Any]]:
        """Every event logged so far, as the JSON lines of the log."""
        found = []
        for line in self.log.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "podwatch_event" in entry:
                contract.check_event(entry)
                found.append(entry)
        return found

    def wait_for(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Poll until ``condition()`` is true; its value. Fails with the status and the log's end otherwise. ``seconds``
        are those of a machine that does nothing else."""
        end = time.monotonic() + PATIENCE * seconds
        while time.monotonic() < end:
            value = condition()
            if value:
                return value
            if self.process is not None and self.process.poll() is not None and self.process.returncode not in (0, -9):
                break
            time.sleep(0.05)
        raise AssertionError(
            f"not within {PATIENCE * seconds:g} s: {what}\nstatus: {json.dumps(self.status())}\n{self.tail()}"
        )

    def wait_event(self, name: str, seconds: float, *, after: int = 0, **fields: Any) -> dict[str, Any]:
        """The first event of this name (and fields) beyond index ``after`` of ``events()``."""

        def found() -> dict[str, Any] | None:
            for event in self.events()[after:]:
                if event["podwatch_event"] == name and all(event.get(k) == v for k, v in fields.items()):
                    return event
            return None

        event: dict[str, Any] = self.wait_for(found, seconds, f"event {name} {fields or ''}")
        return event

    def tail(self, lines: int = 40) -> str:
        """The log's end. Of the saves, which would soon be all of it, only the last."""
        try:
            log = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return "(no log)"
        return "\n".join([line for line in log[:-1] if '"checkpoint-complete"' not in line][-lines:] + log[-1:])

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60.0 * PATIENCE) -> int:
        """End the daemon (training goes on) and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def freeze(self) -> None:
        """SIGSTOP, in force for every thread of it when this returns."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        self.wait_for(lambda: all(_stopped(task) for task in tasks.iterdir()), 20, "it stands still")

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        try:
            self.freeze()
            yield
        finally:
            self.thaw()

    def end_training(self) -> None:
        """Kill daemon, supervisor and everything it kept: for a test's own cleanup."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for record in self.directory.glob("state/*/supervisor/record.json"):
            document = json.loads(record.read_text())
            for pid in (document.get("supervisor"), document.get("pid")):
                _kill_tree(int(pid))


def _stopped(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except OSError:  # a thread that has just ended
        return True


def _kill_tree(pid: int) -> None:
    try:
        children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        return
    for child in children:
        _kill_tree(child)
