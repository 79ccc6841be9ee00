"""Read ``/status`` over HTTP, for users who cannot open the control socket."""

from typing import Any

MAX_ANSWER = 16 << 20


def fetch_status(url: str, *, timeout: float = 2.0) -> dict[str, Any] | None:
    """The status document from ``http://host:port``; None after any failure. ``timeout``: seconds per read."""
    import http.client
    import json
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        return None
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout)
    try:
        connection.request("GET", "/status", headers={"Accept": "application/json"})
        response = connection.getresponse()
        data = response.read(MAX_ANSWER)
        document = json.loads(data) if response.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return document if isinstance(document, dict) else None
