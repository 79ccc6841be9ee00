"""``python -m tests.support.b2server --port 0 --dir D``: prints its URL and serves until killed."""

import argparse
import ctypes
import signal
from pathlib import Path

from tests.support.b2server.server import Handler, Server
from tests.support.b2server.state import State

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--bucket", default="test-bucket")
arguments = parser.parse_args()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test run
server = Server(("127.0.0.1", arguments.port), Handler)
server.state = State(arguments.dir, arguments.bucket)
print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
