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


class Access:
    """Passes a request to ``app``, or refuses it. ``host``: what podwatch listens on; ``extra``: names of it that are
    configured. With the password (HTTP Basic, any user name) a request passes under any ``Host``: a web page of another
    site cannot send the password. Where one is needed, all others but probes and progress pings are refused: 401, or
    403 where podwatch has no password. A foreign ``Host`` is refused, too (421): allowed are loopback and configured
    names, and beyond loopback any IP address, because DNS rebinding needs a name. A request without Host passes: it
    never comes from a browser."""

    def __init__(self, app: ASGIApp, host: str, extra: Iterable[str], password: str) -> None:
        self._app = app
        self._names = _LOOPBACK | {host.lower()} | {name.lower() for name in extra}
        self._open_to_all = beyond_loopback(host)
        self._digest = _digest(password.encode()) if password else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        if self._digest or self._open_to_all:
            if self._has_password(scope):
                return None
            if scope["path"] not in PROBES and not scope["path"].startswith("/heartbeat/"):
                return self._wants_password()
            scope[_UNCHECKED] = True
        hosts = (_hostname(value.decode("latin-1")) for name, value in scope["headers"] if name == b"host")
        return None if all(map(self._allows, hosts)) else _WRONG_HOST

    def _has_password(self, scope: Scope) -> bool:
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

    def _wants_password(self) -> Response:
        if not self._digest:
            return Response(REFUSED_WITHOUT, status_code=403, media_type="text/plain", headers=HEADERS)
        ask = {"WWW-Authenticate": 'Basic realm="podwatch", charset="UTF-8"'}
        return Response(REFUSED_WRONG, status_code=401, media_type="text/plain", headers=HEADERS | ask)

    def _allows(self, name: str) -> bool:
        return name in self._names or (self._open_to_all and _is_address(name))


def _digest(password: bytes) -> bytes:
    """Of one length, so that a comparison does not show how long the password is."""
    return hashlib.sha256(password).digest()


def beyond_loopback(host: str) -> bool:
    """Whether a listener on ``host`` can be reached from other machines; names other than localhost count."""
    return not ipaddress.ip_address(host).is_loopback if _is_address(host) else host.lower() != "localhost"


def _is_address(name: str) -> bool:
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
