"""A trainer that does nothing but save: ``python saving_writer.py dcp|hf OUT LOG COUNT SEED``.

Real ``torch.distributed.checkpoint.save`` and ``torch.save``, with pauses between files and in the middle of them, some
longer than any settle time of the test; now and then an older step is saved again in place (a rollback), and old steps
are deleted. Every begin and end goes to LOG with the monotonic time, which all processes of a machine share. The end is
that of the last write: on a busy machine it may take this process longer than the settle time to come to say so.
"""

import io
import json
import random
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

KEEP = 40
FROM_WALL = max(time.monotonic() - time.time() for _ in range(100))
"""Added to the time of a file it gives the monotonic time. The largest: a pause between the two clocks makes it less.
"""
OLD_ENOUGH = 2.5
"""Seconds. A step is saved again only this long after the first time: mtimes may differ by two seconds (rounding)."""


class Writer:
    def __init__(self, kind: str, out: Path, log: Path, seed: int) -> None:
        self.kind, self.out, self.rng = kind, out, random.Random(seed)
        self.log = log.open("a", buffering=1)
        self.ended: dict[int, float] = {}
        self.steady = 0.95 if kind == "dcp" else 0.99  # a DCP save has two pauses, the other one twelve
        self.number = 0

    def tell(self, event: str, step: int, **more: Any) -> None:
        self.log.write(json.dumps({"event": event, "step": step, "t": time.monotonic(), **more}) + "\n")

    def pause(self) -> None:
        time.sleep(self.rng.choice((0, 0, 0.002, 0.01, 0.03)) if self.rng.random() < self.steady else 0.5)

    def run(self, count: int) -> None:
        step = 0
        for _ in range(count):
            old = [s for s, t in self.ended.items() if time.monotonic() - t > OLD_ENOUGH]
            if old and self.rng.random() < 0.15:
                again = self.rng.choice(old)
            else:
                step += 1
                again = step
            self.save(again)
            while len(self.ended) > KEEP:
                oldest = min(self.ended)
                del self.ended[oldest]
                self.tell("delete", oldest)
                shutil.rmtree(self.place(oldest))
        self.tell("done", step, left=sorted(self.ended))

    def place(self, step: int) -> Path:
        return self.out / (f"step-{step}" if self.kind == "dcp" else f"checkpoint-{step}")

    def save(self, step: int) -> None:
        self.number += 1
        values = torch.full((self.rng.randrange(8, 400),), float(self.number))
        self.tell("begin", step, number=self.number)
        (self.dcp if self.kind == "dcp" else self.hf)(self.place(step), step, values)
        place = self.place(step)
        sizes = {str(p.relative_to(place)): p.stat().st_size for p in place.rglob("*")}
        newest = max(p.stat().st_mtime for p in (place, *place.rglob("*")))  # a directory's is that of the last rename
        self.ended[step] = time.monotonic()
        self.tell("end", step, number=self.number, sizes=sizes, t=newest + FROM_WALL)

    def dcp(self, place: Path, step: int, values: torch.Tensor) -> None:
        writer = self

        class Slow(dcp.FileSystemWriter):
            def write_data(self, *arguments: Any, **named: Any) -> Any:
                done = super().write_data(*arguments, **named)
                writer.pause()
                return done

            def finish(self, *arguments: Any, **named: Any) -> None:
                writer.pause()
                super().finish(*arguments, **named)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {"model": {"w": values}, "optim": {"m": values}, "step": step}
            dcp.save(state, storage_writer=Slow(place), no_dist=True)

    def hf(self, place: Path, step: int, values: torch.Tensor) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for name, value in (
            ("pytorch_model.bin", {"w": values}), ("training_args.bin", {"a": 1}), ("optimizer.pt", {"m": values}),
            ("scheduler.pt", {"last_epoch": step}), ("rng_state.pth", {"cpu": torch.get_rng_state()}),
        ):  # fmt: skip
            buffer = io.BytesIO()
            torch.save(value, buffer)
            self.put(place / name, buffer.getvalue())
        self.put(place / "trainer_state.json", json.dumps({"global_step": step, "n": self.number}).encode())

    def put(self, path: Path, data: bytes) -> None:
        with path.open("wb", buffering=0) as file:
            self.pause()
            file.write(data[: len(data) // 2])
            self.pause()
            file.write(data[len(data) // 2 :])


if __name__ == "__main__":
    torch.set_num_threads(1)
    Writer(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[5])).run(int(sys.argv[4]))
