#!/usr/bin/env python3
"""End the rented machine that this program runs on: ``end_pod.py vast | runpod | url`` (docs/pods.md).

podwatch runs it by ``[end_pod] command`` once the run has ended here. If everything of the run is stored
(PODWATCH_STORED=yes), it destroys the machine with its disk. Otherwise it stops the machine and keeps the disk, which
is still billed. It exits with 0 only if the provider has confirmed the request; podwatch repeats it otherwise.

Standard library only: copy this file to the machine. It never prints a key.

    vast    CONTAINER_ID, CONTAINER_API_KEY (the key of this instance only; Vast.ai sets both); VAST_URL
    runpod  RUNPOD_POD_ID, RUNPOD_API_KEY (RunPod sets both); RUNPOD_API_URL
    url     END_POD_URL, END_POD_METHOD (POST), END_POD_TOKEN: one request with a JSON body, for anything else
"""

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request

SECONDS = 20.0


def request(method: str, url: str, body: object, key: str) -> str:
    """The answer's text. Ends the program with a message for any error."""
    headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "podwatch-end-pod"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    host = urllib.parse.urlsplit(url).netloc
    try:
        sent = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(sent, timeout=SECONDS) as answer:
            return answer.read(1 << 16).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", "replace").strip()
        sys.exit(f"{host} refuses the request: {error.code} {error.reason}: {said}")
    except (OSError, ValueError) as error:
        sys.exit(f"{host} does not answer: {error}")


def variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        sys.exit(f"{name} is not set: put it into the file of [end_pod] env_file")
    return value


def part(name: str) -> str:
    """A variable as one part of a URL's path."""
    return urllib.parse.quote(variable(name), safe="")


def vast(destroy: bool) -> None:
    url = f"{os.environ.get('VAST_URL') or 'https://console.vast.ai'}/api/v0/instances/{part('CONTAINER_ID')}/"
    key = variable("CONTAINER_API_KEY")
    said = request("DELETE", url, {}, key) if destroy else request("PUT", url, {"state": "stopped"}, key)
    try:
        done = json.loads(said).get("success") is True
    except (ValueError, AttributeError):
        done = False  # an empty answer, or another page, is no confirmation
    if not done:
        sys.exit(f"Vast.ai does not confirm the request: {said[:200]!r}")


def runpod(destroy: bool) -> None:
    base = os.environ.get("RUNPOD_API_URL") or "https://api.runpod.io/v2"
    action = {"action": "terminate" if destroy else "stop"}
    request("POST", f"{base}/pods/{part('RUNPOD_POD_ID')}/action", action, variable("RUNPOD_API_KEY"))


def url(destroy: bool) -> None:
    body = {name: os.environ.get(f"PODWATCH_{name.upper()}", "") for name in ("run_id", "outcome", "stored")}
    body["action"] = "destroy" if destroy else "stop"
    request(
        os.environ.get("END_POD_METHOD") or "POST", variable("END_POD_URL"), body, os.environ.get("END_POD_TOKEN", "")
    )


PROVIDERS = {"vast": vast, "runpod": runpod, "url": url}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PROVIDERS:
        sys.exit(f"usage: end_pod.py {' | '.join(PROVIDERS)}")
    stored = os.environ.get("PODWATCH_STORED", "")
    if stored not in ("yes", "no"):
        sys.exit("PODWATCH_STORED must be yes (destroy this machine) or no (stop it and keep its disk)")
    PROVIDERS[sys.argv[1]](stored == "yes")
    print("destroyed" if stored == "yes" else "stopped")
