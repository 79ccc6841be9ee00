"""A TLS connection that reads and writes its socket in large blocks.

``ssl.SSLSocket`` reads the 5-byte head and the body of each record of 16 KiB with system calls of their own. Here TLS
works in memory (``ssl.MemoryBIO``): a large download takes less CPU (benchmarks/transfers.md).
"""

import io
import socket
import ssl
from typing import Any

BLOCK = 1 << 17
"""Bytes received, or encrypted and sent, at once."""


class TlsLine(io.RawIOBase):
    """As much of a socket as ``wire`` uses, and the raw stream below a buffered reader. One thread at a time.

    Every method raises OSError (``ssl.SSLError`` included; TimeoutError after the socket's timeout).
    """

    def __init__(self, line: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Shakes hands; the certificate must be valid for ``host`` as ``context`` requires. On an error the caller
        closes ``line``."""
        self._line, self._received, self._to_send = line, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=host)
        self._block = memoryview(bytearray(BLOCK))
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._exchange()
            except ssl.SSLError:
                self._flush()  # tells the other side why
                raise
        self._flush()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """All that has arrived, as far as it fits: at least one byte; 0 when the other side has ended the
        connection."""
        view, got, read = memoryview(buffer).cast("B"), 0, self._tls.read
        size = len(view)
        while got < size:
            try:
                count = read(size - got, view[got:])
            except ssl.SSLWantReadError:
                if got:
                    break
                self._exchange()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):  # HTTP itself says whether that is too early
                break
            else:
                if not count:
                    break
                got += count  # type: ignore[operator]
        return got

    recv_into = readinto

    def sendall(self, data: Any, /) -> None:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), BLOCK):
            block = view[begin : begin + BLOCK]
            while block:
                block = block[self._tls.write(block) :]
            self._flush()

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(self)

    def settimeout(self, seconds: float | None) -> None:
        self._line.settimeout(seconds)

    def gettimeout(self) -> float | None:
        return self._line.gettimeout()

    def close(self) -> None:
        self._line.close()
        super().close()

    def _exchange(self) -> None:
        """Send what TLS has to say, and receive at least one byte, or the end."""
        self._flush()
        count = self._line.recv_into(self._block)
        if count:
            self._received.write(self._block[:count])
        else:
            self._received.write_eof()

    def _flush(self) -> None:
        if self._to_send.pending:
            self._line.sendall(self._to_send.read())
