"""The launcher: starts inference, orchestrator and trainer, and supervises them as prime-rl's ``rl`` does.

It reacts only to return codes other than 0, and ends when orchestrator AND trainer have ended: it does not notice an
inference server that returns 0. podwatch does.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from layout import Layout

HERE = Path(__file__).parent


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"))
    parser.add_argument("--layout", choices=("A", "B"), default="A")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=40)
    parser.add_argument("--ckpt", action="store_true", help="save checkpoints")
    parser.add_argument("--ckpt.interval", dest="interval", type=int, default=5)
    parser.add_argument("--ckpt.resume-step", dest="resume_a", type=int, help="layout A")
    parser.add_argument("--resume.step", dest="resume_b", type=int, help="layout B")
    parser.add_argument("--trainer.heartbeat.url", dest="heartbeat_url", default="")
    parser.add_argument("--step-time", type=float, default=0.0, help="minimum seconds per step")
    parser.add_argument("--save-time", type=float, default=0.0, help="extra seconds per save")
    return parser.parse_args(argv)


def main() -> int:
    args = parse(sys.argv[1:])
    resume = args.resume_a if args.layout == "A" else args.resume_b
    layout = Layout(args.output_dir, args.layout)
    layout.log("rl").parent.mkdir(parents=True, exist_ok=True)
    shared = [
        f"--output-dir={args.output_dir}", f"--layout={args.layout}", f"--seed={args.seed}",
        f"--max-steps={args.max_steps}", f"--interval={args.interval if args.ckpt else args.max_steps + 1}",
    ]  # fmt: skip
    if resume is not None:
        shared.append(f"--resume-step={resume}")
    timing = [f"--step-time={args.step_time}", f"--save-time={args.save_time}", f"--heartbeat-url={args.heartbeat_url}"]
    commands = {
        "inference": [f"--port={args.port}"],
        "orchestrator": [*shared, f"--port={args.port}"],
        "trainer": [*shared, *timing],
    }
    children: dict[str, subprocess.Popen[bytes]] = {}

    def stop(*_: object) -> None:
        for child in children.values():
            child.terminate()
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    for name, extra in commands.items():
        with layout.log(name).open("wb") as log:
            children[name] = subprocess.Popen(
                [sys.executable, str(HERE / f"{name}.py"), *extra],
                stdout=log, stderr=log, env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
    while True:
        ended = {name: child.poll() for name, child in children.items()}
        failed = {name: code for name, code in ended.items() if code not in (None, 0)}
        if failed:
            print(f"failed: {failed}", flush=True)
            stop()
        if ended["orchestrator"] == 0 and ended["trainer"] == 0:
            print("RL finished", flush=True)
            children["inference"].terminate()
            children["inference"].wait()
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
