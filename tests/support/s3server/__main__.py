"""``python -m tests.support.s3server --port 0 --dir D``: prints its URL and serves until killed. ``--certificate``: a
PEM file with certificate and key, for TLS."""

import argparse
import ctypes
import signal
import ssl
from pathlib import Path

from tests.support.s3server.server import Handler, Server
from tests.support.s3server.state import State

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=0)
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--bucket", default="test-bucket")
parser.add_argument("--certificate", type=Path)
arguments = parser.parse_args()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the test run
server = Server(("127.0.0.1", arguments.port), Handler)
server.state = State(arguments.dir, arguments.bucket)
scheme = "http"
if arguments.certificate:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(arguments.certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    scheme = "https"
print(f"{scheme}://127.0.0.1:{server.server_address[1]}", flush=True)
server.serve_forever()
