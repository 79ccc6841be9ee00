"""An S3 that throws bodies away: what a client can do, not what a store can.

    python -m benchmarks.measuring.discard_s3 [--tls CERTIFICATE KEY]

Believes every signature and checksum, and keeps sizes only. As ``discard``, which serves the connections.
"""

import argparse
import socket
import ssl
import uuid
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote

from benchmarks.measuring.discard import Service, listen

BUCKET = "bench-bucket"


class S3Service(Service):
    """``sizes``: of finished objects."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)
        self.sizes: dict[str, int] = {}
        self.uploads: dict[str, dict[int, int]] = {}

    def one(
        self,
        connection: socket.socket,
        method: str,
        target: str,
        headers: dict[str, str],
        rest: bytes,
        buffer: bytearray,
    ) -> bytes:
        path, _, text = target.partition("?")
        query = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
        key = unquote(path).removeprefix(f"/{BUCKET}").lstrip("/")
        length = int(headers.get("content-length") or 0)
        if headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "transfer-encoding" in headers:
            raise ValueError("no chunked bodies here")
        if method == "PUT":
            _, rest = self._swallow(connection, rest, length, buffer)
        else:
            while len(rest) < length:
                rest += connection.recv(65536)
            rest = rest[length:]
        size = int(headers.get("x-amz-decoded-content-length") or length)
        status, extra, data = self._answer(method, key, query, size)
        head = f"HTTP/1.1 {status}\r\nDate: {formatdate(usegmt=True)}\r\n{extra}"
        if "Content-Length" not in extra and not status.startswith("204"):
            head += f"Content-Length: {len(data)}\r\n"
        connection.sendall(head.encode() + b"\r\n" + (b"" if method == "HEAD" else data))
        return rest

    def _answer(self, method: str, key: str, query: dict[str, str], size: int) -> tuple[str, str, bytes]:
        upload = query.get("uploadId", "")
        with self.lock:
            if method == "PUT" and upload:
                self.uploads[upload][int(query["partNumber"])] = size
            elif method == "PUT" and key:
                self.sizes[key] = size
            elif method == "POST" and "uploads" in query:
                made = uuid.uuid4().hex
                self.uploads[made] = {}
                inside = f"<Bucket>{BUCKET}</Bucket><Key>{key}</Key><UploadId>{made}</UploadId>"
                return "200 OK", "", _xml("InitiateMultipartUploadResult", inside)
            elif method == "POST":
                self.sizes[key] = sum(self.uploads.pop(upload).values())
                return (
                    "200 OK",
                    "",
                    _xml("CompleteMultipartUploadResult", f"<Key>{key}</Key><ETag>&quot;e-1&quot;</ETag>"),
                )
            elif method == "HEAD":
                if key not in self.sizes:
                    return "404 Not Found", "", b""
                more = f"Content-Length: {self.sizes[key]}\r\nx-amz-meta-podwatch-writer: bench\r\n"
                return "200 OK", f'ETag: "e"\r\nLast-Modified: {formatdate(usegmt=True)}\r\n{more}', b""
            elif method == "GET":
                return "200 OK", "", _xml("ListBucketResult", "<IsTruncated>false</IsTruncated>")
            elif method == "DELETE":
                return "204 No Content", "", b""
        return "200 OK", 'ETag: "00000000000000000000000000000000"\r\n', b""


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inside}</{name}>'.encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tls", nargs=2)
    args: Any = parser.parse_args()
    tls = None
    if args.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*args.tls)
    listen(S3Service(), tls)


if __name__ == "__main__":
    main()
