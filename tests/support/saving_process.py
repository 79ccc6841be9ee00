"""A trainer as a process of its own that saves and deletes without asking anybody: ``python -m
tests.support.saving_process``. A JSON object on stdin says how; then each line is one tick of time.

Exit 0: all saves were written. Else the error stands in ``report``. Between two saves it waits for so many ticks, which
the test hands out as its guard gets turns: a machine under load is slow for both, as a pod's clock is the same for
trainer and podwatch.
"""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

from tests.support.checkpoints import broadcast_operations, dcp_operations, finish, orchestrator_operations


def main() -> int:
    how = json.loads(sys.stdin.readline())
    out, report = Path(how["out"]), Path(how["report"])
    written, step = 0, 0
    try:
        for number in range(1, how["saves"] + 1):
            step = 5 * number
            burst = how["burst"] and number % how["burst"] == 0
            for _ in range(0 if burst else how["ticks"]):
                if not sys.stdin.readline():
                    return 3
            save(out, step, how["size"])
            written += 1
            if how["links"]:
                link(out, step, Path(how["links"]))
            for old in steps(out)[: -how["keep_last"]] if how["keep_last"] else ():
                shutil.rmtree(out / "checkpoints" / f"step_{old}", ignore_errors=True)
            report.write_text(json.dumps({"written": written, "step": step, "error": ""}))
    except OSError as error:
        text = f"{error.strerror} at step {step}"
        with contextlib.suppress(OSError):
            report.write_text(json.dumps({"written": written, "step": step, "error": text}))
        return 1
    return 0


def save(out: Path, step: int, size: int) -> None:
    """As the user's: of 47 GB 31 are state, and 16 weights for the engine, which the trainer never deletes."""
    here = out / "checkpoints" / f"step_{step}"
    finish(orchestrator_operations(here / "orchestrator", step, "B"))
    finish(broadcast_operations(out / "broadcasts" / f"step_{step}", size * 16 // 47))
    finish(dcp_operations(here / "trainer", size * 31 // 47, 1, ""))


def steps(out: Path) -> list[int]:
    return sorted(int(p.name[5:]) for p in (out / "checkpoints").glob("step_*"))


def link(out: Path, step: int, precious: Path) -> None:
    """What people and trainers leave in such trees: hard links to what is shared, symlinks inwards and outwards."""
    here = out / "checkpoints" / f"step_{step}"
    with contextlib.suppress(FileNotFoundError):  # removed already
        os.link(precious / "tokenizer.json", here / "trainer" / "tokenizer.json.shared")
    with contextlib.suppress(FileNotFoundError):
        (here / "trainer" / "base").symlink_to(precious)
    latest = out / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(here)


if __name__ == "__main__":
    sys.exit(main())
