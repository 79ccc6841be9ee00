"""Who gets an answer over HTTP: the password, and the names that podwatch can be called by.

``Host`` is checked, so that a web page in a browser cannot reach the endpoints by DNS rebinding. Beyond loopback, or
where a password is set, requests need it.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
"""Of every answer."""
REFUSED_WITHOUT = (
    "podwatch listens beyond loopback without a password, so it answers only /livez, /readyz, /healthz and progress"
    " pings. Set [http] password_file and restart podwatch, or set [http] host to 127.0.0.1 and use"
    " `ssh -L 9477:127.0.0.1:9477 POD` (docs/notifications.md). Training continues either way.\n"
)
REFUSED_WRONG = "Permission denied: this address needs the password in [http] password_file (any user name).\n"
PROBES = frozenset({"/livez", "/readyz", "/healthz"})
"""Answered without a password too, with one word: orchestrators probe them."""
_UNCHECKED = "podwatch.unchecked"
"""Key of a request's scope that was not checked for a password where one is needed."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


_WRONG_HOST = Response(
    json.dumps({"error": "Invalid value for Host (expected an address of this podwatch)"}) + "\n",
    status_code=421,
    media_type="application/json",
    headers=HEADERS,
)


class PasswordCheck:
    """Requests with the password (HTTP Basic, any user name) reach ``app``, under any ``Host``: a web page of another
    site cannot send the password. The others reach ``unchecked``, and there only probes and progress pings; the rest is
    refused: 401, or 403 where podwatch has no password."""

    def __init__(self, app: ASGIApp, unchecked: ASGIApp, password: str) -> None:
        self._app, self._unchecked = app, unchecked
        self._digest = _digest(password.encode()) if password else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._right(scope):
                await self._app(scope, receive, send)
                return
            if scope["path"] not in PROBES and not scope["path"].startswith("/heartbeat/"):
                await self._refusal()(scope, receive, send)
                return
            scope[_UNCHECKED] = True
        await self._unchecked(scope, receive, send)

    def _right(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not self._digest or len(given) != 1:
            return False
        kind, _, encoded = given[0].partition(b" ")
        if kind.lower() != b"basic":
            return False
        try:
            _, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except ValueError:
            return False
        return bool(colon) and hmac.compare_digest(_digest(password), self._digest)

    def _refusal(self) -> Response:
        if not self._digest:
            return Response(REFUSED_WITHOUT, status_code=403, media_type="text/plain", headers=HEADERS)
        ask = {"WWW-Authenticate": 'Basic realm="podwatch", charset="UTF-8"'}
        return Response(REFUSED_WRONG, status_code=401, media_type="text/plain", headers=HEADERS | ask)


def _digest(password: bytes) -> bytes:
    """Of one length, so that a comparison does not show how long the password is."""
    return hashlib.sha256(password).digest()


class HostCheck:
    """Refuses requests with a foreign ``Host`` (421). A request without Host passes: it never comes from a browser."""

    def __init__(self, app: ASGIApp, rule: "HostRule") -> None:
        self._app, self._rule = app, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == b"host" and not self._rule.allows(_hostname(value.decode("latin-1"))):
                    await _WRONG_HOST(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def beyond_loopback(host: str) -> bool:
    """Whether a listener on ``host`` can be reached from other machines; names other than localhost count."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() != "localhost"


class HostRule:
    """Allows loopback and configured names, and beyond loopback any IP address, because DNS rebinding needs a name."""

    def __init__(self, host: str, extra: Iterable[str]) -> None:
        self._names = _LOOPBACK | {host.lower()} | {h.lower() for h in extra}
        self.open_to_all = beyond_loopback(host)

    def allows(self, name: str) -> bool:
        if name in self._names:
            return True
        if not self.open_to_all:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _hostname(header: str) -> str:
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def unchecked(request: Request) -> bool:
    """Whether it needed a password and has none: it gets one word."""
    return _UNCHECKED in request.scope
