"""A pod with an inference server, engines and a trainer, each a real process, on the NVML stand-in."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.asking import status
from tests.support.daemon import DaemonProcess
from tests.support.nvml import GIB, NvmlWorld
from tests.support.ports import free_port
from tests.support.rig import Rig

PROGRAM = Path(__file__).with_name("served_trainer.py")
ENGINES = 4


class ServedPod:
    """Tensor-parallel inference on GPUs 0 to 3, the trainer on GPU 4, one server; or one engine that shares GPU 0 with
    the trainer. The daemon only observes: it says what it would restart, so that one can be struck again and again.
    """

    def __init__(self, rig: Rig, *, asleep: bool = False, shared: bool = False, **settings: Any) -> None:
        rig.cards.stop()
        self.rig, self.control = rig, rig.control
        self.server(asleep=asleep)  # asked every 30 s
        engines, cards = (1, 1) if shared else (ENGINES, ENGINES + 1)
        self.world = rig.world = NvmlWorld(rig.root / "world", devices=cards)
        self.port = free_port()
        command = [sys.executable, "-S", str(PROGRAM), str(self.control), str(self.port), str(engines)]
        wanted: dict[str, Any] = {
            "trainer__command": command, "gpu__inference": list(range(engines)), "gpu__trainer": [cards - 1],
            "inference__urls": [f"http://127.0.0.1:{self.port}"],
        }  # fmt: skip
        self.daemon: DaemonProcess = rig.daemon(**(wanted | settings)).start()
        self.daemon.wait_for((self.control / f"engine{engines - 1}.pid").exists, 40, "started")
        for index in range(cards):  # not before: it starts only on empty GPUs
            self.memory(index, 60)
            self.world.set_load(index, utilization=80)
        self.daemon.wait_for(lambda: {f"silent-death:gpu{engines - 1}", "hang"} <= set(self.armed), 40, "armed")
        # Observing, it would have started nothing.
        self.daemon.config.write_text(rig.config(**(wanted | settings | {"mode": "observe"})))
        assert self.daemon.process is not None
        self.daemon.process.send_signal(signal.SIGHUP)
        self.daemon.wait_event("config-reloaded", 20)

    @property
    def armed(self) -> list[str]:
        found: list[str] = status(self.daemon)["daemon"]["armed"]
        return found

    def memory(self, index: int, gib: int) -> None:
        self.world.set_memory(index, gib * GIB)

    def engines(self, gib: int) -> None:
        for index in range(ENGINES):
            self.memory(index, gib)

    def server(self, **order: Any) -> None:
        path = self.control / "server.json"
        path.with_suffix(".new").write_text(json.dumps(order))
        path.with_suffix(".new").replace(path)

    def pid(self, name: str) -> int:
        return int((self.control / f"{name}.pid").read_text())

    def no_tokens_any_more(self) -> bool:
        """Nothing more of them is seen for longer than podwatch's looks at the server are apart."""

        def made() -> float | None:
            total: float | None = status(self.daemon)["inference"][0]["generation_tokens_total"]
            return total

        before = made()
        time.sleep(0.5)
        return before is not None and made() == before

    def critical(self) -> dict[str, str]:
        """What it would restart for: kind and words."""
        return {r["kind"]: r["summary"] for r in status(self.daemon)["reasons"] if r["severity"] == "critical"}

    def warned(self, kind: str, words: str = "", seconds: float = 15) -> None:
        """It says so, whatever it would do about it."""

        def told() -> bool:
            return any(r["kind"] == kind and words in r["summary"] for r in status(self.daemon)["reasons"])

        self.daemon.wait_for(told, seconds, f"{kind} that says {words!r}")

    def found(self, kind: str, words: str, seconds: float = 15) -> None:
        self.daemon.wait_for(lambda: words in self.critical().get(kind, ""), seconds, f"{kind} that says {words!r}")

    def well(self, seconds: float = 15) -> None:
        self.daemon.wait_for(lambda: not self.critical(), seconds, "well again")


QUICK: dict[str, Any] = {
    "inference__poll": "0.2s", "inference__timeout": "0.3s", "hang__floor": "2s", "hang__k": 2.0,
}  # fmt: skip
