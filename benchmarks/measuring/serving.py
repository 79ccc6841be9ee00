"""A B2 service that hands files out: what a client can fetch and verify, not what a store can.

    python -m benchmarks.measuring.serving DIRECTORY [--latency 0.06] [--rate 40e6] [--prefix set/]
                                           [--tls CERTIFICATE KEY]

The files of DIRECTORY are the bucket, below the prefix. One thread per connection; bodies go from the page cache to the
socket by sendfile, or over TLS in blocks of 1 MiB. JSON calls are answered as in discard.py. Prints each file as a line
of JSON (its name, file id, size, and the SHA-1 of each part), and then its URL.
"""

import argparse
import hashlib
import json
import os
import re
import socket
import ssl
import time
from email.utils import formatdate
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from benchmarks.measuring.discard import Json, Service, listen

PART = 100_000_000
_PIECE = 1 << 18
_BLOCK = 1 << 20


class Serving(Service):
    def __init__(self, latency: float, rate: float, directory: Path, prefix: str) -> None:
        super().__init__(latency, rate)
        self.paths: dict[str, Path] = {}
        self.listed: list[Json] = []
        for path in sorted(directory.iterdir()):
            hashes = parts_hashes(path)
            known = hashes[0] if len(hashes) == 1 else "none"  # a large file's own hash is known to nobody
            file = self._file(prefix + path.name, path.stat().st_size, known, "upload")
            self.paths[str(file["fileId"])] = path
            self.listed.append(file)
            print(json.dumps([path.name, file["fileId"], path.stat().st_size, hashes]), flush=True)

    def answer(self, call: str, version: str, headers: dict[str, str], body: Json, sent: tuple[int, str]) -> Json:
        if call in ("b2_list_file_names", "b2_list_file_versions"):
            prefix, start, count = body.get("prefix") or "", body.get("startFileName") or "", body["maxFileCount"]
            found = [f for f in self.listed if f["fileName"].startswith(prefix) and f["fileName"] >= start]
            more = found[count] if len(found) > count else {}
            return {"files": found[:count], "nextFileName": more.get("fileName"), "nextFileId": more.get("fileId")}
        return super().answer(call, version, headers, body, sent)

    def one(
        self,
        connection: socket.socket,
        method: str,
        target: str,
        headers: dict[str, str],
        rest: bytes,
        buffer: bytearray,
    ) -> bytes:
        path, _, query = target.partition("?")
        file = self._wanted(path, dict(parse_qsl(query)))
        if file is None:
            return super().one(connection, method, target, headers, rest, buffer)
        self._hand_out(connection, file, headers.get("range", ""), body=method == "GET")
        return rest

    def _wanted(self, path: str, query: dict[str, str]) -> Json | None:
        if path.endswith("/b2_download_file_by_id"):
            return self.files[query["fileId"]]
        if not path.startswith("/file/"):
            return None
        name = unquote(path.split("/", 3)[3])
        return next((f for f in self.listed if f["fileName"] == name), None)

    def _hand_out(self, connection: socket.socket, file: Json, wanted: str, *, body: bool) -> None:
        size, status, span = int(file["contentLength"]), "200 OK", ""
        first, last = 0, size - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            first, last = int(match[1]), min(size - 1, int(match[2] or size))
            status, span = "206 Partial Content", f"Content-Range: bytes {first}-{last}/{size}\r\n"
        if self.latency:
            time.sleep(self.latency)
        connection.sendall(
            f"HTTP/1.1 {status}\r\nDate: {formatdate(usegmt=True)}\r\nContent-Length: {last + 1 - first}\r\n{span}"
            f"Accept-Ranges: bytes\r\nContent-Type: application/octet-stream\r\nX-Bz-File-Id: {file['fileId']}\r\n"
            f"X-Bz-File-Name: {quote(file['fileName'])}\r\nX-Bz-Content-Sha1: {file['contentSha1']}\r\n"
            f"X-Bz-Upload-Timestamp: {file['uploadTimestamp']}\r\n\r\n".encode()
        )
        if not body:
            return
        began, position = time.monotonic(), first
        with self.paths[file["fileId"]].open("rb", buffering=0) as source:
            while position <= last:
                count = last + 1 - position
                if isinstance(connection, ssl.SSLSocket):
                    data = os.pread(source.fileno(), min(_BLOCK, count), position)
                    connection.sendall(data)
                    position += len(data)
                else:
                    position += os.sendfile(
                        connection.fileno(), source.fileno(), position, min(_PIECE, count) if self.rate else count
                    )
                if self.rate:
                    time.sleep(max(0.0, (position - first) / self.rate - (time.monotonic() - began)))


def parts_hashes(path: Path) -> list[str]:
    sha1 = []
    with path.open("rb", buffering=0) as file:
        while data := file.read(PART):
            while len(data) < PART and (more := file.read(PART - len(data))):
                data += more
            sha1.append(hashlib.sha1(data).hexdigest())
    return sha1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--prefix", default="set/")
    parser.add_argument("--tls", nargs=2)
    args = parser.parse_args()
    tls = None
    if args.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*args.tls)
    listen(Serving(args.latency, args.rate, args.directory, args.prefix), tls)


if __name__ == "__main__":
    main()
