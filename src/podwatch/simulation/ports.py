"""Ports that stay free until they are used."""

import random
import socket


def free_port() -> int:
    """Below those that the kernel hands out by itself (32768 and above): no connection and no other server gets it in
    between, also while a server that is stopped will come back to it."""
    while True:
        port = random.randrange(16384, 32768)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # somebody has it
            continue
