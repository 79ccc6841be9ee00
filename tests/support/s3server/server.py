"""HTTP in front of the state: addressing, signatures, faults, bodies, and the admin endpoint."""

import base64
import hashlib
import json
import time
import urllib.parse
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from tests.support import store_server
from tests.support.s3server import auth
from tests.support.s3server.operations import CALLS, operation
from tests.support.s3server.state import Fault, Key, State, Traits
from tests.support.store_server import ApiError, Cut

_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


class Received(NamedTuple):
    """A body on disk, and its hashes."""

    file: Path
    size: int
    md5: str
    sha1: str


class Handler(store_server.Handler):
    state: State
    wbufsize = 1 << 16
    fault: Fault | None = None
    payload = ""

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _serve(self) -> None:
        path, _, query = self.path.partition("?")
        self.unread = int(self.headers.get("Content-Length") or 0)
        self.fault = None
        try:
            if path.startswith("/admin/"):
                data = json.dumps(self._admin(path[7:], json.loads(self.read(self.unread) or b"{}"))).encode()
                self.answer(200, data, {"Content-Type": "application/json"})
            else:
                if self.headers.get("Expect") == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                self._store(path, query)
        except ApiError as error:
            with suppress(Cut):
                self.drain()
            self.answer_error(error)
        except (Cut, ConnectionError):
            self.cut()
        with suppress(OSError, ValueError):
            self.wfile.flush()

    def _store(self, path: str, raw_query: str) -> None:
        query = dict(urllib.parse.parse_qsl(raw_query, keep_blank_values=True))
        bucket, key = self._address(path)
        ep = operation(self.command, key, query, self.headers)
        self._faulty(ep, key)
        signer, self.payload = auth.check(
            self.command, path, raw_query, self.headers, self.state.keys, self.state.traits.region, self.state.now()
        )
        if bucket != self.state.bucket:
            raise ApiError(404, "NoSuchBucket", "The specified bucket does not exist")
        CALLS[ep](self, signer, key, query)

    def _address(self, path: str) -> tuple[str, str]:
        host = (self.headers.get("Host") or "").partition(":")[0]
        path = urllib.parse.unquote(path)
        if host.startswith(f"{self.state.bucket}.") and "virtual" in self.state.traits.styles:
            return self.state.bucket, path[1:]
        if "path" not in self.state.traits.styles:
            raise ApiError(400, "InvalidRequest", "path-style addressing is not supported")
        bucket, _, key = path[1:].partition("/")
        return bucket, key

    def _faulty(self, ep: str, key: str) -> None:
        self.state.calls[ep] += 1
        if self.state.latency:
            time.sleep(self.state.latency)
        rule = self.fault = self.state.fault(ep, key)
        if rule is None:
            return
        self.state.happened("fault", key, action=rule.action, on=ep)
        if rule.action == "error200":
            self.drain()
            raise ApiError(200, rule.code, f"injected {rule.code}")
        self.suffer(rule, download=ep == "GetObject")

    # -- bodies -----------------------------------------------------------------------------------------------------

    def body(self) -> bytes:
        """A small one, checked as ``receive`` does."""
        received = self.receive()
        data = received.file.read_bytes()
        received.file.unlink()
        return data

    def receive(self) -> Received:
        """The body, on disk, after the checks that this server makes."""
        traits = self.state.traits
        need256 = "sha256" in traits.verify and len(self.payload) == 64
        wants_sha256 = need256 or bool(self.headers.get("x-amz-checksum-sha256"))
        md5, sha1 = hashlib.md5(), hashlib.sha1()
        sha256 = hashlib.sha256()
        wants_md5 = traits.etag == "md5" or self.headers.get("Content-MD5")
        wants_sha1 = bool(self.headers.get("x-amz-checksum-sha1")) or not traits.discard
        file, size = self.state.scratch(), 0
        flip = self.fault is not None and self.fault.action == "flip"
        with file.open("wb") as out:
            for piece in self._pieces():
                data, flip = (bytes([piece[0] ^ 1]) + piece[1:], False) if flip else (piece, flip)
                if wants_md5:
                    md5.update(data)
                if wants_sha1:
                    sha1.update(data)
                if wants_sha256:
                    sha256.update(data)
                size += len(data)
                if not traits.discard:
                    out.write(data)
        try:
            self._judge(md5.digest(), sha1.digest(), sha256.digest(), signed=need256)
        except ApiError:
            file.unlink()
            raise
        return Received(file, size, md5.hexdigest(), base64.b64encode(sha1.digest()).decode())

    def _pieces(self) -> Any:
        if not self.payload.startswith("STREAMING-"):
            while self.unread:
                yield self.read(min(self.unread, 1 << 20))
            return
        while True:  # aws-chunked, as other clients send: SIZE;chunk-signature=...
            size = int(self._line().partition(b";")[0], 16)
            if not size:
                self.read(self.unread)  # the trailer
                return
            yield self.read(size)
            self._line()

    def _line(self) -> bytes:
        line = self.rfile.readline(4096)
        self.unread -= len(line)
        return line.strip()

    def _judge(self, md5: bytes, sha1: bytes, sha256: bytes, *, signed: bool) -> None:
        verify = self.state.traits.verify
        announced = self.headers.get("Content-MD5")
        checked = announced or any(name.lower().startswith("x-amz-checksum-") for name in self.headers)
        if self.state.traits.lock and self.command == "PUT" and not checked:
            raise ApiError(
                400,
                "InvalidRequest",
                "Content-MD5 OR x-amz-checksum- HTTP header is required for requests with Object Lock parameters",
            )
        if announced and "md5" in verify and base64.b64decode(announced) != md5:
            raise ApiError(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        announced = self.headers.get("x-amz-checksum-sha256")
        if announced and "sha256" in verify and base64.b64decode(announced) != sha256:
            raise ApiError(400, "BadDigest", "The SHA256 you specified did not match the calculated checksum.")
        announced = self.headers.get("x-amz-checksum-sha1")
        if announced and "sha1" in verify and base64.b64decode(announced) != sha1:
            raise ApiError(400, "BadDigest", "The SHA1 you specified did not match the calculated checksum.")
        if signed and sha256.hex() != self.payload:
            raise ApiError(
                400, "XAmzContentSHA256Mismatch", "The provided 'x-amz-content-sha256' header does not match."
            )

    # -- answers ----------------------------------------------------------------------------------------------------

    def need(self, signer: Key, permission: str, key: str) -> None:
        if permission not in signer.permissions or not key.startswith(signer.prefix):
            raise ApiError(403, "AccessDenied", "Access Denied")

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.fault and self.fault.action == "lost":
            raise Cut
        if self.fault and self.fault.action == "late":
            status = self.fault.status
            data = self._error_document(ApiError(status, self.fault.code, "late"))
        sent = {"Content-Length": str(len(data)), "x-amz-request-id": "R", **(headers or {})}
        if status == 204:
            del sent["Content-Length"]
        self.send_response(status)
        for name, value in sent.items():
            self.send_header(name, value)
        self.end_headers()
        if self.fault and self.fault.action == "torn":
            self.close_connection, data = True, data[: len(data) // 2]
        if self.command != "HEAD" and status != 204:
            self.wfile.write(data)

    def answer_xml(self, name: str, inside: str, headers: dict[str, str] | None = None) -> None:
        text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} {_NAMESPACE}>{inside}</{name}>'
        self.answer(200, text.encode(), {"Content-Type": "application/xml", **(headers or {})})

    def _error_document(self, error: ApiError) -> bytes:
        inside = f"<Code>{error.code}</Code><Message>{escape(error.message)}</Message>{error.extra}"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inside}<RequestId>R</RequestId></Error>'.encode()

    def answer_error(self, error: ApiError) -> None:
        try:
            data = b"" if self.command == "HEAD" else self._error_document(error)
            self.answer(error.status, data, {"Content-Type": "application/xml", **error.headers})
        except (Cut, ConnectionError):
            self.cut()

    def send_object(self, file: Path, size: int, headers: dict[str, str], span: tuple[int, int] | None) -> None:
        """The bytes from disk, with the faults that a download can have."""
        start, end = span or (0, size)
        self.send_response(200 if span is None else self.state.traits.range_status)
        if span is not None:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        for name, value in {**headers, "Content-Length": str(end - start), "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.send_file(file, start, end)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(self.state.now() if timestamp is None else timestamp)

    # -- admin ------------------------------------------------------------------------------------------------------

    def _admin(self, what: str, body: Any) -> Any:
        state = self.state
        with state.lock:
            if what == "fault":
                state.faults.append(Fault(**body))
            elif what == "clear":
                state.faults.clear()
            elif what == "key":
                key = Key(**{**body, "permissions": tuple(body.get("permissions", Key("", "").permissions))})
                state.keys[key.access_key] = key
            elif what == "traits":
                fields = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items()}
                state.traits = Traits(**{**asdict(state.traits), **fields})
            elif what == "pace":
                state.latency, state.rate = body.get("latency", 0.0), body.get("rate", 0.0)
            elif what == "clock":
                state.clock_ahead = body["ahead"]
            elif what == "forget-uploads":
                for upload in list(state.uploads.values()):
                    state.drop_upload(upload)
            elif what == "damage":
                version = state.current(body["key"])
                assert version is not None
                data = bytearray(state.body(version).read_bytes())
                data[body.get("at", 0)] ^= 0xFF
                state.body(version).write_bytes(data)
            elif what == "drop":
                for version in list(state.objects.get(body["key"], ())):
                    state.drop(version)
            elif what == "put":  # an object of somebody else
                data = base64.b64decode(body["data"]) if "data" in body else body["text"].encode()
                file = state.scratch()
                file.write_bytes(data)
                state.add(body["key"], file, size=len(data), etag=hashlib.md5(data).hexdigest())
            elif what != "state":
                raise ApiError(404, "not_found")
            return {
                "events": state.events,
                "violations": state.violations + state.invariant(),
                "calls": state.calls,
                "sent": state.sent,
                "uploads": [asdict(u) for u in state.uploads.values()],
                "versions": [asdict(v) for k in sorted(state.objects) for v in state.objects[k]],
            }
