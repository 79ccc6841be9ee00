"""Send a podwatch notice to PagerDuty (Events API v2): opens an alert, and resolves it when the condition is over.

    [notify]
    command = ["/usr/bin/python3", "/root/pagerduty.py", "/root/.config/podwatch/pagerduty-key"]

The file holds the integration key of the service; mode 0600. Standard library only. Exit 0 only if PagerDuty accepted
the event, or it needs nobody.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

URL = os.environ.get("PAGERDUTY_URL", "https://events.pagerduty.com/v2/enqueue")  # the EU: events.eu.pagerduty.com


def event(notice: dict, key: str) -> dict:
    """The event of a notice (docs/notifications.md). The same condition of the same run is one alert."""
    return {
        "routing_key": key,
        "event_action": "resolve" if notice["change"] == "closed" else "trigger",
        "dedup_key": f"podwatch/{notice['run_id']}/{notice['key']}"[:255],
        "payload": {
            "summary": notice["title"][:1024],
            "severity": notice["severity"],
            "source": notice["host"],
            "timestamp": notice["at"],
            "custom_details": {"text": notice["text"], "cost": notice["cost"], "do": notice["do"]},
        },
    }


def main() -> int:
    key = Path(sys.argv[1]).read_text().strip()
    notice = json.load(sys.stdin)
    if notice["severity"] != "critical" and notice["change"] != "closed":
        return 0  # nobody is woken by it; the end of an alert that is not open is ignored there
    body = json.dumps(event(notice, key)).encode()
    request = urllib.request.Request(URL, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=15) as answer:
        print(f"HTTP {answer.status}")
        return 0 if answer.status == 202 else 1


if __name__ == "__main__":
    sys.exit(main())
