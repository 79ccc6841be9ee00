"""HTTP in front of the state: authorization, faults, uploads, downloads, and the admin endpoint."""

import base64
import hashlib
import json
import re
import time
import urllib.parse
from contextlib import suppress
from typing import Any

from tests.support import store_server
from tests.support.b2server.api import CALLS, CLASSES, as_version, authorize, describe, need
from tests.support.b2server.state import Fault, Key, State
from tests.support.store_server import ApiError, Cut


class Handler(store_server.Handler):
    state: State
    fault: Fault | None = None

    @property
    def base(self) -> str:
        host, port = self.server.server_address[:2]
        return f"http://{host!s}:{port}"

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path, _, query = self.path.partition("?")
        self.unread = int(self.headers.get("Content-Length") or 0)
        self.fault = None
        try:
            if path.startswith("/admin/"):
                self._answer(200, self._admin(path[7:], json.loads(self._body() or b"{}")))
            elif path.startswith("/file/") or path.endswith("/b2_download_file_by_id"):
                self._faulty("b2_download")
                self._download(path, dict(urllib.parse.parse_qsl(query)))
            else:
                ep = path.split("/")[3] if path.count("/") >= 3 else path
                self._faulty(ep)
                self._answer(200, self._call(ep, path))
        except ApiError as error:
            with suppress(Cut):
                self.drain()
            body = {"status": error.status, "code": error.code, "message": error.message}
            self._answer(error.status, body, error.headers)
        except (Cut, ConnectionError):
            self.cut()

    def _faulty(self, ep: str) -> None:
        self.state.count(ep, CLASSES.get(ep, "A"))
        if self.state.latency:
            time.sleep(self.state.latency)
        name = urllib.parse.unquote_plus(self.headers.get("X-Bz-File-Name") or "")
        rule = self.fault = self.state.fault(ep, name)
        if rule is None:
            return
        self.state.happened("fault", ep, action=rule.action, on=ep)
        self.suffer(rule, download=ep == "b2_download")

    def _body(self) -> bytes:
        return self.read(self.unread) if self.unread else b""

    def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        if self.fault and self.fault.action == "lost":
            raise Cut
        if self.fault and self.fault.action == "late":
            status, body = self.fault.status, {"status": self.fault.status, "code": self.fault.code, "message": "late"}
        data = json.dumps(body).encode()
        self.send_response(status)  # adds Date, which b2sdk's clock check needs
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.fault and self.fault.action == "torn":
            self.close_connection, data = True, data[: len(data) // 2]
        if self.command != "HEAD":
            self.wfile.write(data)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, ep: str, path: str) -> Any:
        if ep in ("b2_upload_file", "b2_upload_part"):
            return self._upload(ep, path.rsplit("/", 1)[1])
        raw = self._body()
        if ep == "b2_authorize_account":
            key_id, _, secret = base64.b64decode(self.headers["Authorization"].split(" ")[1]).decode().partition(":")
            key = self.state.keys.get(key_id)
            if key is None or key.key != secret:
                raise ApiError(401, "unauthorized", "invalid application key")
            self.state.happened(ep)
            return authorize(self.state, key, self.base, path.split("/")[2])
        call = CALLS.get(ep)
        if call is None:
            raise ApiError(400, "bad_request", f"unknown endpoint {ep}")
        key, body = self._key(), json.loads(raw)
        with self.state.lock:
            result = call(self.state, key, body, self.base)
            self.state.happened(ep, result.get("fileName", ""), file_id=result.get("fileId", ""))
        return as_version(result, path.split("/")[2])

    def _key(self) -> Key:
        key = self.state.tokens.get(self.headers.get("Authorization", ""))
        if key is None:
            raise ApiError(401, "expired_auth_token", "authorization token expired")
        return key

    def _upload(self, ep: str, token: str) -> Any:
        state = self.state
        with state.lock:
            if token not in state.upload_tokens or self.headers["Authorization"] != token:
                raise ApiError(401, "expired_auth_token", "upload token expired")
            if token in state.busy:
                raise ApiError(400, "auth_token_limit", f"more than one upload using auth token {token}")
            state.busy.add(token)
            key, file_id = state.upload_tokens[token]
        try:
            return self._small(key) if ep == "b2_upload_file" else self._part(file_id)
        finally:
            with state.lock:
                state.busy.discard(token)

    def _content(self) -> tuple[bytes, str]:
        """The body without a trailing hash, checked against the hash that came with it."""
        data, announced = self._body(), self.headers["X-Bz-Content-Sha1"]
        if announced == "hex_digits_at_end":
            data, announced = data[:-40], data[-40:].decode()
        digest = hashlib.sha1(data).hexdigest()
        if digest != announced or (self.fault and self.fault.action == "flip"):
            raise ApiError(400, "bad_request", "Checksum did not match data received")
        return data, digest

    def _small(self, key: Key) -> Any:
        name = urllib.parse.unquote_plus(self.headers["X-Bz-File-Name"])
        need(self.state, key, "writeFiles", name)
        info = {n[10:].lower(): urllib.parse.unquote_plus(v) for n, v in self.headers.items() if _is_info(n)}
        data, digest = self._content()
        with self.state.lock:
            version = self.state.add(name, "upload", info, self.headers["Content-Type"])
            version.size, version.sha1 = len(data), digest
            self.state.body(version).write_bytes(data)
            self.state.save(version)
            self.state.happened("b2_upload_file", name, file_id=version.file_id)
        return describe(self.state, version)

    def _part(self, file_id: str) -> Any:
        number = int(self.headers["X-Bz-Part-Number"])
        data, digest = self._content()
        with self.state.lock:
            version = self.state.versions.get(file_id)
            if version is None or version.action != "start":
                raise ApiError(400, "bad_request", f"No active upload for: {file_id}")
            self.state.part(file_id, number).write_bytes(data)
            self.state.happened("b2_upload_part", version.name, part=number)
        return {"fileId": file_id, "partNumber": number, "contentLength": len(data), "contentSha1": digest}

    def _download(self, path: str, query: dict[str, str]) -> None:
        state, key = self.state, self._key()
        if path.startswith("/file/"):
            bucket, _, name = path[6:].partition("/")
            name = urllib.parse.unquote_plus(name)
            version = state.newest(name) if bucket == state.bucket else None
        else:
            version = state.versions.get(query["fileId"])
            version = version if version and version.action == "upload" else None
        if version is None:
            raise ApiError(404, "not_found", "file not present")
        need(state, key, "readFiles", version.name)
        state.happened("b2_download", version.name)
        start, end, status = 0, version.size, 200
        if match := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            status = 206
            if match[1]:
                start, end = int(match[1]), min(end, int(match[2] or end) + 1)
            else:
                start = max(0, end - int(match[2]))
            if start >= version.size:
                raise ApiError(416, "range_not_satisfiable")
        self.send_response(status)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{version.size}")
        self.send_header("Content-Type", version.content_type)
        self.send_header("X-Bz-File-Id", version.file_id)
        self.send_header("X-Bz-File-Name", urllib.parse.quote(version.name))
        self.send_header("X-Bz-Content-Sha1", version.sha1)
        self.send_header("X-Bz-Upload-Timestamp", str(version.timestamp_ms))
        for name, value in version.info.items():
            self.send_header(f"X-Bz-Info-{name}", urllib.parse.quote(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.send_file(state.body(version), start, end)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.state.clock_ahead if timestamp is None else timestamp)

    # -- admin ------------------------------------------------------------------------------------------------------

    def _admin(self, what: str, body: Any) -> Any:
        state = self.state
        with state.lock:
            if what == "fault":
                state.faults.append(Fault(**body))
            elif what == "clear":
                state.faults.clear()
            elif what == "key":
                key = Key(**{**body, "capabilities": tuple(body.get("capabilities", Key("", "").capabilities))})
                state.keys[key.key_id] = key
            elif what == "expire":
                state.tokens.clear()
                state.upload_tokens.clear()
            elif what == "pace":
                state.latency, state.rate = body.get("latency", 0.0), body.get("rate", 0.0)
            elif what == "clock":
                state.clock_ahead = body["ahead"]
            elif what == "recommend":
                state.recommended_part = body["part_size"]
            elif what == "damage":
                version = state.versions[body["file_id"]]
                data = bytearray(state.body(version).read_bytes())
                data[body.get("at", 0)] ^= 0xFF
                state.body(version).write_bytes(data)
            elif what == "count":
                return {"events": len(state.events)}
            elif what == "versions":
                return {"versions": state.shown()}
            elif what == "violations":
                return {"violations": state.violations + state.invariant()}
            elif what == "drop":
                state.drop(state.versions[body["file_id"]])
            elif what != "state":
                raise ApiError(404, "not_found")
            return {
                "events": state.events,
                "violations": state.violations + state.invariant(),
                "calls": state.calls,
                "classes": state.classes,
                "sent": state.sent,
                "versions": state.shown(),
            }


def _is_info(name: str) -> bool:
    return name.lower().startswith("x-bz-info-")
