"""Child process for podwatch's own W&B run: ``wandb.init`` can block for minutes, which must not block podwatch.

One file without imports of podwatch, run by its path with ``python -I``, so that it also runs under the trainer's
Python, where wandb is usually installed. It reads JSON lines from standard input: first
``{"init": {...}, "idle": seconds}``, then ``{"log": {...}}`` or ``{"alert": {...}}``. Each is answered by one line,
``{"ok": ..., "why": ...}``. It ends when its input closes, after ``idle`` seconds without input, or when W&B fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import tempfile
import threading
from typing import Any

FINISH_SECONDS = 20.0
"""Time to send the remaining data after the input closes; also ends a hung ``init``."""


def quiet(wandb: Any) -> Any:
    """wandb settings, as far as this version has them: this run must not record system metrics, code or console
    output."""
    wanted = {
        "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
        "x_disable_stats": True, "x_disable_meta": True, "x_save_requirements": False, "init_timeout": 100,
    }  # fmt: skip
    known = getattr(wandb.Settings, "model_fields", None) or getattr(wandb.Settings, "__annotations__", {})
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def stay_in(directory: str) -> str:
    """The directory of all that W&B writes: never one of training. Empty, for another user than podwatch: one of this
    user's own, in the home if that can be written, else a temporary one."""
    home = os.path.expanduser("~/.cache/podwatch-wandb")  # noqa: PTH111 - a Python of the trainer, without our imports
    for place in (directory, home) if directory else (home,):
        with contextlib.suppress(OSError):
            os.makedirs(place, mode=0o700, exist_ok=True)  # noqa: PTH103
            if os.access(place, os.W_OK):
                break
    else:
        place = tempfile.mkdtemp(prefix="podwatch-wandb-")
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "ARTIFACT_DIR"):
        os.environ[f"WANDB_{name}"] = place
    return place


def read_orders(orders: queue.Queue[str | None]) -> None:
    """Queue the input lines; runs in a thread, to detect the end of the input while W&B blocks."""
    for line in sys.stdin:
        orders.put(line)
    orders.put(None)
    timer = threading.Timer(FINISH_SECONDS, os._exit, (0,))
    timer.daemon = True
    timer.start()


def main() -> int:
    # W&B and its libraries print to stdout, so the answers use a separate descriptor.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(ok: bool, why: str = "") -> None:
        with contextlib.suppress(OSError):  # podwatch has ended: the input closes, too
            answers.write(json.dumps({"ok": ok, "why": why[:300]}) + "\n")

    orders: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=read_orders, args=(orders,), daemon=True).start()
    first = orders.get()
    if first is None:
        return 0
    begin = json.loads(first)
    idle = float(begin["idle"])
    try:
        begin["init"]["dir"] = stay_in(begin["init"]["dir"])
        import wandb

        run = wandb.init(settings=quiet(wandb), **begin["init"])
        # The same axis as the training's own run, so that both can be plotted over steps.
        run.define_metric("podwatch/*", step_metric="podwatch/step")
    except Exception as error:
        answer(False, f"{type(error).__name__}: {error}")
        return 1
    answer(True, run.url or "offline")
    while True:
        try:
            line = orders.get(timeout=idle)
        except queue.Empty:
            line = None  # podwatch hangs or has ended
        if line is None:
            break
        order = json.loads(line)
        try:
            if "log" in order:
                run.log(order["log"])
            elif "alert" in order:
                alert = dict(order["alert"])
                level = getattr(wandb.AlertLevel, alert.pop("level"))
                run.alert(level=level, wait_duration=0, **alert)
            answer(True)
        except Exception as error:
            answer(False, f"{type(error).__name__}: {error}")
    run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
