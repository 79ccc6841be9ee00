"""The real daemon with simulated GPUs: ``python -m podwatch.simulation.daemon -c FILE --gpus DIR``."""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from podwatch.app.build import StartOptions
from podwatch.app.main import serve
from podwatch.config.last_good import load_or_last_good
from podwatch.domain.errors import PodwatchError
from podwatch.simulation.run_files import SimulatedGpus


def main() -> int:
    """Run the daemon. Unlike ``podwatch run`` it uses a simulated GPU reader and accepts a store on the same disk."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-c", "--config", type=Path, required=True)
    parser.add_argument("--gpus", type=Path, required=True)
    arguments = parser.parse_args()
    try:
        loaded = load_or_last_good(arguments.config, environ=os.environ)
        start = StartOptions(gpu_reader=SimulatedGpus(arguments.gpus), same_disk_store=True)
        return asyncio.run(serve(loaded, start))
    except PodwatchError as error:
        print(f"podwatch: {error}", file=sys.stderr)
        return int(error.exit_code)


if __name__ == "__main__":
    raise SystemExit(main())
