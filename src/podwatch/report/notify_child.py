"""Child process that sends one notice to one URL, or makes one call of the dead-man's switch. Reads a request from
standard input, prints the result as JSON.

``http://`` and ``https://`` get a POST of the document. Every other scheme (ntfy, tgram, slack, discord, mailto...)
needs apprise, an optional extra that is imported here only.
"""

import base64
import json
import logging
import sys
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

_AGAIN = frozenset({408, 425, 429})
"""Temporary refusals; every other 4xx is an error of the address or the key, so that a retry fails, too."""
_LIMIT = 4096


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET, or carry a key to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(url: str, notice: dict[str, Any], timeout: float) -> tuple[bool, str, bool]:
    """POST the notice; returns (sent, response or error, whether a retry is useless)."""
    return call("POST", url, json.dumps(notice), "application/json", timeout)


def call(method: str, url: str, body: str, kind: str, timeout: float) -> tuple[bool, str, bool]:
    """Make one HTTP call; returns (accepted, response or error, whether a retry is useless)."""
    parts = urllib.parse.urlsplit(url)
    headers = {"Content-Type": kind, "User-Agent": "podwatch"} if body else {"User-Agent": "podwatch"}
    if parts.username is not None:
        pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    request = urllib.request.Request(  # noqa: S310 - the caller checked the scheme
        parts._replace(fragment="").geturl(), body.encode() if method == "POST" else None, headers, method=method
    )
    try:
        with urllib.request.build_opener(_NoRedirects()).open(request, timeout=timeout) as answer:
            answer.read(_LIMIT)
            return True, f"HTTP {answer.status}", False
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(200).decode("utf-8", "replace").strip()
        final = 300 <= error.code < 500 and error.code not in _AGAIN
        return False, f"HTTP {error.code}" + (f": {said}" if said else ""), final
    except urllib.error.URLError as error:
        return False, str(error.reason), False
    except (OSError, HTTPException, ValueError) as error:
        return False, str(error) or type(error).__name__, isinstance(error, ValueError)


class _Said(logging.Handler):
    """Collects apprise's log lines: its return value has no reason of a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def by_apprise(url: str, notice: dict[str, Any]) -> tuple[bool, str, bool]:
    try:
        import apprise
    except ImportError:
        scheme = url.partition(":")[0]
        return False, f"{scheme}:// needs apprise: install podwatch[notify]", True
    said = _Said()
    log = logging.getLogger("apprise")
    log.addHandler(said)
    log.propagate = False
    sender = apprise.Apprise()
    if not sender.add(url):
        return False, "apprise does not understand this URL", True
    kinds = {"critical": apprise.NotifyType.FAILURE, "warning": apprise.NotifyType.WARNING}
    sent = sender.notify(
        body=notice["text"],
        title=notice["title"],
        notify_type=kinds.get(notice["severity"], apprise.NotifyType.INFO),
        body_format=apprise.NotifyFormat.TEXT,
    )
    return bool(sent), "sent" if sent else (said.lines or ["apprise could not send it"])[-1][:300], False


def main() -> int:
    order = json.loads(sys.stdin.buffer.readline())
    url, timeout = str(order["url"]), float(order["timeout"])
    if "method" in order:
        ok, why, final = call(str(order["method"]), url, str(order["body"]), "text/plain; charset=utf-8", timeout)
    elif url.startswith(("http://", "https://")):
        ok, why, final = post(url, order["notice"], timeout)
    else:
        ok, why, final = by_apprise(url, order["notice"])
    print(json.dumps({"ok": ok, "why": why, "final": final}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
