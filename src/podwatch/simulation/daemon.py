"""The real daemon with simulated GPUs: ``python -m podwatch.simulation.daemon -c FILE --gpus DIR``."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from podwatch.config.last_good import load_or_last_good
from podwatch.daemon.app import serve
from podwatch.domain.errors import PodwatchError
from podwatch.judgement.detectors import hang
from podwatch.simulation.gpus import SimulatedGpus


def main() -> int:
    """What differs from ``podwatch run``: the GPU reader, a store that may lie on the same disk, and the time that a
    hang's second signal must hold."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--gpus", type=Path, required=True)
    parser.add_argument("--agree-seconds", type=float, required=True)
    arguments = parser.parse_args()
    # A demo cannot wait the ten minutes that a second signal must hold in earnest; nothing else of judgement changes.
    hang.AGREE_WINDOW_SECONDS = hang.HEALTH_WINDOW_SECONDS = arguments.agree_seconds
    try:
        loaded = load_or_last_good(arguments.config, environ=os.environ)
        return asyncio.run(serve(loaded, gpu_reader=SimulatedGpus(arguments.gpus), same_disk_store=True))
    except PodwatchError as error:
        print(f"podwatch: {error}", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
