"""A port for a server of a test."""

import random
import socket


def free_port() -> int:
    """Below the range that the kernel assigns automatically (32768 and above), so that no connection and no other
    server takes it, even while its server restarts."""
    while True:
        port = random.randrange(16384, 32768)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # the port is in use
            continue
