"""The committed checkpoints of real libraries (``tests/checkpoints/golden``), put back operation by operation.

``index.json`` holds the order in which the library opened, closed and renamed its files. A replay does the same with
the committed contents; each file passes through "opened", "half" and "whole", the moments at which a writer can die.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.drivers.checkpoints import Layout, open_layout, scan

GOLDEN = Path(__file__).parents[1] / "checkpoints" / "golden"
INDEX: dict[str, dict[str, object]] = json.loads((GOLDEN / "index.json").read_text())
LONG = bool(os.environ.get("PODWATCH_LONG_TESTS"))
"""Set by ``make test-torch``: the exhaustive share of the harness runs too."""


@dataclass(frozen=True, slots=True)
class Golden:
    """``steps`` are those that can be resumed from, ``others`` those that lie there and cannot. ``touched_by`` names
    paths (relative, by their beginning) outside a step's directory that belong to every save."""

    name: str
    steps: tuple[int, ...]
    parts: tuple[str, ...]
    world_size: int | None
    token: bool
    step_dir: str = "{step}"
    below: str = ""
    others: tuple[int, ...] = ()
    marked: bool = True
    layout: str = ""

    @property
    def source(self) -> str:
        return self.name.partition(":")[0]

    @property
    def kind(self) -> str:
        return str(INDEX[self.source]["layout"])

    def make(self, out: Path) -> Layout:
        return open_layout(self.kind, out / self.below if self.below else out)

    def copy(self, out: Path) -> Layout:
        """The finished directory, mtimes in the order in which the files were written."""
        shutil.copytree(GOLDEN / self.source, out)
        for link, target in links(self.source).items():
            (out / link).symlink_to(target)
        settle_times(self, out)
        return self.make(out)

    def belongs(self, step: int, path: str) -> bool:
        if self.kind == "orbax":
            return path.partition("/")[0].partition(".")[0] == str(step)
        return f"{self.step_dir.format(step=step)}/" in f"/{path}/".replace("/_actor/", "/").replace("/_critic/", "/")


GOLDENS = (
    Golden("dcp-2-ranks", (5, 10), ("checkpoint",), 2, True, "/step-{step}"),
    Golden("prime-rl:a", (5, 10), ("broadcast", "orchestrator", "trainer"), 2, True, "/step_{step}", "a"),
    Golden("prime-rl:b", (5, 10), ("orchestrator", "trainer"), 2, True, "/step_{step}", "b"),
    Golden("hf", (2, 4), ("checkpoint",), None, False, "/checkpoint-{step}"),
    Golden("hf-sharded", (2, 4), ("checkpoint",), None, False, "/checkpoint-{step}"),
    Golden("hf-ddp", (2, 4), ("checkpoint",), 2, False, "/checkpoint-{step}", marked=False),
    Golden("hf-fsdp", (2, 4), ("checkpoint",), 2, True, "/checkpoint-{step}", marked=False),
    Golden("hf-deepspeed", (2, 4), ("checkpoint",), 2, False, "/checkpoint-{step}"),
    Golden("accelerate", (0, 1, 2), ("checkpoints",), None, False, "/checkpoint_{step}", marked=False),
    Golden("lightning", (2, 4), ("checkpoint",), None, False, "/epoch=0-step={step}.ckpt"),
    Golden("lightning-directory", (2, 4), ("checkpoint",), None, True, "/epoch=0-step={step}.ckpt"),
    Golden("deepspeed", (1, 2), ("checkpoint",), 2, False, "/global_step{step}"),
    Golden("deepspeed-zero3", (1, 2), ("checkpoint",), 2, False, "/global_step{step}"),
    Golden("openrlhf", (5, 10), ("actor", "critic"), 2, False, "/global_step{step}"),
    Golden("torchtitan", (10,), ("checkpoint",), 2, True, "/step-{step}", others=(12,)),
    Golden("megatron", (10, 20), ("checkpoint",), 2, True, "/iter_{step:07d}"),
    Golden("verl", (2, 4), ("checkpoint",), 2, False, "/global_step_{step}"),
    Golden("orbax", (10, 20), ("checkpoint",), None, True, "/{step}"),
    Golden("runner", (3, 6), ("checkpoint",), None, False, "/step_{step}", marked=False),
)
_QUICK = ("dcp-2-ranks", "prime-rl:a", "hf-sharded", "deepspeed", "verl", "lightning-directory", "orbax", "megatron")
SOME = GOLDENS if LONG else tuple(g for g in GOLDENS if g.name in _QUICK)
"""For tests that try many things with each: the rest is tried by ``make test-torch``."""


def links(source: str) -> dict[str, str]:
    """Path and target of the symlinks that the finished directory holds. Only ``index.json`` has them, so that a copy
    of this repository that knows no symlinks is whole."""
    order: list[list[str]] = INDEX[source]["order"]  # type: ignore[assignment]
    return {path: target for kind, target, *rest in order if kind == "symlink" for path in rest}


def files_of(layout: Layout, step: int, *, required: bool = True) -> list[Path]:
    """Every regular file of the step's parts."""
    found = [p.part.path / f.path for p in scan(layout, step) if p.part.required or not required for f in p.files]
    return sorted(found)


def shift(root: Path, seconds: float) -> None:
    """Move every mtime below ``root``."""
    for path in sorted(root.rglob("*"), reverse=True):
        status = path.lstat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(seconds * 1e9)), follow_symlinks=False)


def settle_times(golden: Golden, out: Path) -> None:
    """As if written an hour ago, a second between files, in the recorded order."""
    began = int((out.stat().st_mtime - 3600) * 1e9)
    for number, (_, path, _) in enumerate(replay(golden, out, dry=True)):
        target = out / path
        if target.is_symlink() or target.is_file():
            stamp = began + number * 50_000_000
            os.utime(target, ns=(stamp, stamp), follow_symlinks=False)


# -- replay -----------------------------------------------------------------------------------------------------------

Done = tuple[str, str, str]
"""What was done, the path it was done to, and the text if the file is a small one."""


def replay(golden: Golden, out: Path, *, dry: bool = False, step: int | None = None) -> Iterator[Done]:
    """Do the recorded operations one after another; yields after each. ``step``: only those of one step, trackers
    included. ``dry``: only tell."""
    order: list[list[str]] = INDEX[golden.source]["order"]  # type: ignore[assignment]
    for place, operation in enumerate(order):
        kind, path = operation[0], operation[-1] if operation[0] != "end" else operation[1]
        if golden.below and not path.startswith(golden.below + "/"):
            continue
        if step is not None and not _of_step(golden, step, operation):
            continue
        for what, act in _moments(golden, out, order, place):
            if not dry:
                act()
            yield what, path, operation[2] if len(operation) > 2 and kind == "end" else ""


def _of_step(golden: Golden, step: int, operation: list[str]) -> bool:
    """Of this step's directory; of a shared file, the write that names this step."""
    path = operation[1]
    owners = [s for s in (*golden.steps, *golden.others) if golden.belongs(s, path)]
    if owners:
        return step in owners
    if operation[0] == "symlink":
        return str(step) in operation[1]
    return operation[0] == "end" and len(operation) > 2 and operation[2].strip().endswith(str(step))


def _moments(
    golden: Golden, out: Path, order: list[list[str]], place: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    kind, *names = order[place]
    target = out / (names[0] if kind in ("begin", "end") else names[-1])
    if kind == "mkdir":
        yield "mkdir", lambda: target.mkdir(parents=True, exist_ok=True)
    elif kind == "begin":
        yield "opened", lambda: _put(target, b"")
    elif kind in ("end", "arrive"):
        data = names[1].encode() if len(names) > 1 else content(golden, order, place, names[0])
        if kind == "end" and len(data) > 1:
            yield "half", lambda: _put(target, data[: len(data) // 2])
        yield "whole", lambda: _put(target, data)
    elif kind == "rename":
        source = out / names[0]
        if source.suffix == ".__lock" or not _ends(order, place, names[0]):  # renamed before it was closed
            data = content(golden, order, place - 1, names[0])
            yield "filled", lambda: None if source.is_dir() else _put(source, data)
        yield "renamed", lambda: source.replace(target)
    elif kind == "unlink":
        yield "unlinked", lambda: target.unlink(missing_ok=True)
    elif kind == "symlink":
        yield "linked", lambda: _link(target, names[0])


def _ends(order: list[list[str]], place: int, path: str) -> bool:
    return any(o[0] == "end" and o[1] == path for o in order[:place])


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def content(golden: Golden, order: list[list[str]], place: int, path: str) -> bytes:
    """What the file held in the end, wherever later renames brought it."""
    for kind, *names in order[place + 1 :]:
        if kind == "rename" and (path == names[0] or path.startswith(names[0] + "/")):
            path = names[1] + path[len(names[0]) :]
    final = GOLDEN / golden.source / path
    return final.read_bytes() if final.is_file() else b"gone"
