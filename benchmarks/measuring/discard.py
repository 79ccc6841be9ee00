"""A B2 service that throws bodies away: what a client can do, not what a store can.

    python -m benchmarks.measuring.discard [--latency 0.06] [--rate 40e6] [--tls CERTIFICATE KEY]

One thread per connection on raw sockets. It answers as B2's native API does (v4, v3 and v1, as b2sdk, the b2 tool and
rclone speak it), believes the SHA-1 that comes with a body, and keeps nothing but sizes. ``--latency`` delays each
answer, ``--rate`` limits each connection, in bytes per second, as a line over a distance does. Prints its URL.
"""

import argparse
import json
import socket
import ssl
import threading
import time
import uuid
from email.utils import formatdate
from typing import Any
from urllib.parse import quote, unquote

Json = dict[str, Any]
BUCKET, BUCKET_ID = "bench-bucket", "bkt0000000000000000000000"
_BLOCK = 1 << 20


class Service:
    def __init__(self, latency: float, rate: float) -> None:
        self.latency, self.rate = latency, rate
        self.lock = threading.Lock()
        self.files: dict[str, Json] = {}
        self.parts: dict[str, dict[int, tuple[int, str]]] = {}
        self.names: dict[str, str] = {}
        self.received = 0
        self.calls: dict[str, int] = {}
        self.base = ""

    # -- what each call answers ---------------------------------------------------------------------------------

    def answer(self, call: str, version: str, headers: dict[str, str], body: Json, sent: tuple[int, str]) -> Json:
        if call == "b2_authorize_account":
            return self._authorize(version)
        if call == "b2_list_buckets":
            bucket = {"accountId": "acct", "bucketId": BUCKET_ID, "bucketName": BUCKET, "bucketType": "allPrivate"}
            lock = {"isClientAuthorizedToRead": True, "value": {"defaultRetention": {"mode": None, "period": None},
                    "isFileLockEnabled": False}}  # fmt: skip
            sse = {"isClientAuthorizedToRead": True, "value": {"algorithm": None, "mode": None}}
            bucket |= {"fileLockConfiguration": lock, "defaultServerSideEncryption": sse, "bucketInfo": {}}
            bucket |= {"corsRules": [], "lifecycleRules": [], "options": [], "revision": 1}
            return {"buckets": [bucket]}
        if call == "b2_get_upload_url":
            token = uuid.uuid4().hex
            url = f"{self.base}/b2api/{version}/b2_upload_file/{token}"
            return {"bucketId": BUCKET_ID, "uploadUrl": url, "authorizationToken": token}
        if call == "b2_get_upload_part_url":
            token = uuid.uuid4().hex
            url = f"{self.base}/b2api/{version}/b2_upload_part/{body['fileId']}/{token}"
            return {"fileId": body["fileId"], "uploadUrl": url, "authorizationToken": token}
        if call == "b2_upload_file":
            return self._file(unquote(headers["x-bz-file-name"]), sent[0], sent[1], "upload")
        if call == "b2_start_large_file":
            return self._file(body["fileName"], 0, "none", "start")
        if call == "b2_finish_large_file":
            file = self.files[body["fileId"]]
            file["contentLength"] = file["size"] = sum(s for s, _ in self.parts.pop(body["fileId"], {}).values())
            file["action"] = "upload"
            return file
        if call == "b2_cancel_large_file":
            file = self.files.pop(body["fileId"])
            return {"accountId": "acct", "bucketId": BUCKET_ID, "fileId": body["fileId"], "fileName": file["fileName"]}
        if call == "b2_list_unfinished_large_files":
            return {"files": [], "nextFileId": None}
        if call == "b2_list_parts":
            return {"parts": [], "nextPartNumber": None}
        if call in ("b2_list_file_names", "b2_list_file_versions"):
            return {"files": [], "nextFileName": None, "nextFileId": None}
        if call == "b2_get_file_info":
            return self.files[body["fileId"]]
        if call == "b2_create_bucket":
            return {"accountId": "acct", "bucketId": BUCKET_ID, "bucketName": BUCKET, "bucketType": "allPrivate"}
        raise KeyError(call)

    def part(self, file_id: str, headers: dict[str, str], sent: tuple[int, str]) -> Json:
        number = int(headers["x-bz-part-number"])
        with self.lock:
            self.parts.setdefault(file_id, {})[number] = sent
        return {"fileId": file_id, "partNumber": number, "contentLength": sent[0], "contentSha1": sent[1],
                "contentMd5": None, "uploadTimestamp": int(time.time() * 1000),
                "serverSideEncryption": {"algorithm": None, "mode": None}}  # fmt: skip

    def _file(self, name: str, size: int, sha1: str, action: str) -> Json:
        file_id = f"4_z{uuid.uuid4().hex}"
        retention = {"isClientAuthorizedToRead": True, "value": {"mode": None, "retainUntilTimestamp": None}}
        file = {
            "accountId": "acct", "action": action, "bucketId": BUCKET_ID, "contentLength": size, "size": size,
            "contentMd5": None, "contentSha1": sha1, "contentType": "application/octet-stream", "fileId": file_id,
            "fileInfo": {"podwatch-writer": "bench"}, "fileName": name, "fileRetention": retention,
            "legalHold": {"isClientAuthorizedToRead": True, "value": None},
            "serverSideEncryption": {"algorithm": None, "mode": None}, "uploadTimestamp": int(time.time() * 1000),
        }  # fmt: skip
        with self.lock:
            self.files[file_id] = file
        return file

    def _authorize(self, version: str) -> Json:
        capabilities = ["listBuckets", "listFiles", "readFiles", "writeFiles", "deleteFiles"]
        common = {"accountId": "acct", "authorizationToken": "token"}
        flat = {"apiUrl": self.base, "downloadUrl": self.base, "s3ApiUrl": self.base,
                "absoluteMinimumPartSize": 5_000_000, "recommendedPartSize": 100_000_000}  # fmt: skip
        allowed: Json = {"capabilities": capabilities, "namePrefix": None}
        if version in ("v1", "v2", "v3"):
            old = {"bucketId": None, "bucketName": None, **allowed}
            return {**common, **flat, "minimumPartSize": 100_000_000, "allowed": old}
        storage = {**flat, "infoType": "storageApi", "allowed": {"buckets": None, **allowed}}
        return {**common, "applicationKeyExpirationTimestamp": None, "apiInfo": {"storageApi": storage}}

    # -- one connection -------------------------------------------------------------------------------------------

    def serve(self, connection: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(_BLOCK)
        rest = b""
        try:
            if tls is not None:
                connection = tls.wrap_socket(connection, server_side=True)
            while True:
                while b"\r\n\r\n" not in rest:
                    more = connection.recv(65536)
                    if not more:
                        return
                    rest += more
                head, _, rest = rest.partition(b"\r\n\r\n")
                first, *lines = head.decode("latin-1").split("\r\n")
                headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
                method, target, _ = first.split(" ")
                rest = self.one(connection, method, target, headers, rest, buffer)
        except (OSError, ValueError, KeyError):
            return
        finally:
            connection.close()

    def one(
        self,
        connection: socket.socket,
        method: str,
        target: str,
        headers: dict[str, str],
        rest: bytes,
        buffer: bytearray,
    ) -> bytes:
        """Answer one request; returns what was read beyond it."""
        path = target.partition("?")[0]
        length = int(headers.get("content-length") or 0)
        if headers.get("expect"):
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if path.startswith("/file/"):
            connection.sendall(self._head(unquote(path.split("/", 3)[3])))
            return rest
        _, _, version, call, *more = path.split("/")
        upload = call in ("b2_upload_file", "b2_upload_part")
        if upload:
            body, (tail, rest) = {}, self._swallow(connection, rest, length, buffer)
        else:
            while len(rest) < length:
                rest += connection.recv(65536)
            body, rest = json.loads(rest[:length] or b"{}"), rest[length:]
            tail = b""
        sha1 = headers.get("x-bz-content-sha1", "")
        at_end = sha1 == "hex_digits_at_end"
        sent = (length - 40 if at_end else length, tail.decode() if at_end else sha1)
        answer = self.part(more[0], headers, sent) if call == "b2_upload_part" else self.answer(
            call, version, headers, body, sent
        )  # fmt: skip
        with self.lock:
            self.received += sent[0] if upload else 0
            self.calls[call] = self.calls.get(call, 0) + 1
        data = json.dumps(answer).encode()
        if self.latency:
            time.sleep(self.latency)
        connection.sendall(
            f"HTTP/1.1 200 OK\r\nDate: {formatdate(usegmt=True)}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return rest

    def _head(self, name: str) -> bytes:
        """rclone asks whether its target is a file, and afterwards whether it is there."""
        with self.lock:
            file = next((f for f in self.files.values() if f["fileName"] == name and f["action"] == "upload"), None)
        date = f"Date: {formatdate(usegmt=True)}\r\n"
        if file is None:
            return f"HTTP/1.1 404 Not Found\r\n{date}Content-Length: 0\r\n\r\n".encode()
        return (
            f"HTTP/1.1 200 OK\r\n{date}Content-Length: {file['contentLength']}\r\nX-Bz-File-Id: {file['fileId']}\r\n"
            f"Content-Type: {file['contentType']}\r\nX-Bz-File-Name: {quote(name)}\r\n"
            f"X-Bz-Content-Sha1: {file['contentSha1']}\r\nX-Bz-Upload-Timestamp: {file['uploadTimestamp']}\r\n\r\n"
        ).encode()

    def _swallow(
        self, connection: socket.socket, rest: bytes, length: int, buffer: bytearray
    ) -> tuple[bytes, tuple[bytes, bytes]] | Any:
        """Drop the body but for its last 40 bytes; (tail, what follows)."""
        began, got = time.monotonic(), min(len(rest), length)
        keep = rest[:got][-40:]
        rest = rest[got:]
        flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_TRUNC  # dropped in the kernel
        while got < length:
            left = length - got
            if left > 40 + len(buffer):
                count = connection.recv_into(buffer, len(buffer), flags)
                if self.rate:
                    ahead = got / self.rate - (time.monotonic() - began)
                    if ahead > 0.002:
                        time.sleep(ahead)
                keep = b""
            else:
                count = connection.recv_into(buffer, min(left, len(buffer)))
                keep = (keep + bytes(buffer[:count]))[-40:]
            if not count:
                raise ConnectionError
            got += count
        return keep, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--tls", nargs=2)
    args = parser.parse_args()
    tls = None
    if args.tls:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*args.tls)
    listen(Service(args.latency, args.rate), tls)


def listen(service: Service, tls: ssl.SSLContext | None = None) -> None:
    """For ever, on a free port of loopback; its URL is printed first."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    service.base = f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    print(service.base, flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=service.serve, args=(connection, tls), daemon=True).start()


if __name__ == "__main__":
    main()
