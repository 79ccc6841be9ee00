#!/usr/bin/env python3
"""RunPod for ``podwatch controller``: ``runpod.py list | create | destroy`` (docs/controller.md).

REST API v2 over plain HTTPS, with the standard library. Needs contract.py beside it, runpod.toml (or
RUNPOD_CONFIG) and RUNPOD_API_KEY; RUNPOD_API_URL is honoured. The API has no interruptible pods.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from email.message import Message
from typing import IO, Any

import contract
from contract import (
    NO_OFFER,
    OUTCOME_UNKNOWN,
    REFUSED,
    UNAVAILABLE,
    Instance,
    Order,
    ProviderError,
    clipped,
    log,
    number,
)

DEFAULTS: dict[str, Any] = {
    "gpus": [],  # ids of the catalog, in your order of preference: ["NVIDIA GeForce RTX 4090", "NVIDIA L40S"]
    "gpu_count": 1,
    "cloud": "SECURE",  # or COMMUNITY
    "image": "",
    "template": "",  # a template's id, instead of an image
    "disk_gb": 0,  # of the container; a restart of the pod empties it
    "arguments": "",  # for the image's entrypoint: the start command
    "data_centers": [],
    "minimum_cuda": "",
    "volume": "",  # a network volume's id, and where it is mounted
    "volume_path": "/workspace",
    "environment": {},
    "pass": [],
}
STATES = {
    "PROVISIONING": "pending", "STARTING": "pending", "RUNNING": "running", "EXITED": "stopped", "TERMINATED": "ended",
}  # fmt: skip
"""ERROR and everything else is unknown: the pod exists and may be billed."""
SECONDS = 30.0
LARGEST = 32 << 20
PAGING = ("next", "cursor", "page", "more", "token", "offset")


class SameHost(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: urllib would send the key to the new host."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        return None


OPENER = urllib.request.build_opener(SameHost)


@dataclass(frozen=True)
class Reply:
    """``status`` 0: none came. ``sent``: the request may have reached RunPod. ``data`` is None if it is not whole."""

    status: int = 0
    data: Any = None
    detail: str = ""
    retry_after: float | None = None
    sent: bool = True

    def __str__(self) -> str:
        return f"{self.status or 'no answer'} {self.detail}".strip()


class RunPod:
    def __init__(self) -> None:
        self._settings = contract.settings("runpod", DEFAULTS)
        self._key = contract.variable("RUNPOD_API_KEY")
        self._base = (os.environ.get("RUNPOD_API_URL") or "https://api.runpod.io/v2").rstrip("/")

    def account(self) -> str:
        found = self._get("/account")
        account = found.get("id") if isinstance(found, dict) else None
        if not isinstance(account, str) or not account:
            raise ProviderError(UNAVAILABLE, f"no account in the answer: {clipped(found)}")
        return f"runpod:{account}"

    def instances(self) -> list[Instance]:
        found = self._get("/pods")
        pods = found.get("pods") if isinstance(found, dict) else None
        if not isinstance(pods, list) or not all(isinstance(pod, dict) for pod in pods):
            raise ProviderError(UNAVAILABLE, f"no list of pods in the answer: {clipped(found)}")
        # The API gives all pods at once. If it ever gives pages, this program must not take the first one for all.
        paging = [key for key, value in found.items() if value and any(word in key.lower() for word in PAGING)]
        if paging:
            raise ProviderError(UNAVAILABLE, f"the list of pods has pages, which this program cannot read: {paging}")
        return [_instance(pod) for pod in pods]

    def create(self, order: Order) -> tuple[str, float]:
        body = self._body(order)
        denied: list[Reply] = []
        candidates = self._candidates(order.max_price_per_hour)
        for gpu, price in candidates:
            reply = self._send("POST", "/pods", {**body, "gpu": {**body["gpu"], "id": gpu}})
            if reply.status == 201 and isinstance(reply.data, dict) and reply.data.get("name") == order.label:
                made = reply.data.get("id")
                if isinstance(made, str) and made:
                    return self._within(made, order, max(number(reply.data.get("cost")) or 0.0, price))
            if reply.status in (402, 422):  # no money, or a request that no GPU type can change
                raise ProviderError(REFUSED, f"RunPod refuses the request: {reply}")
            if reply.status == 429 or not reply.sent:
                raise ProviderError(UNAVAILABLE, str(reply))
            if reply.status not in (400, 403):
                raise ProviderError(OUTCOME_UNKNOWN, f"a pod may exist: {reply}")
            log(f"{gpu} is refused: {reply}")  # 400 is a rule or no capacity: the API does not tell them apart
            denied.append(reply)
        if denied and all(reply.status == 403 for reply in denied):
            raise ProviderError(REFUSED, f"the key cannot create pods: {denied[-1]}")
        raise ProviderError(
            NO_OFFER, f"none of {len(candidates)} GPU types within ${order.max_price_per_hour:g} per hour is free"
        )

    def destroy(self, instance: Instance) -> None:
        reply = self._send("DELETE", f"/pods/{urllib.parse.quote(instance.id, safe='')}", None)
        if reply.status in (401, 403):
            raise ProviderError(REFUSED, f"the key cannot delete pods: {reply}")
        if reply.status not in (200, 202, 204, 404):
            raise ProviderError(UNAVAILABLE, str(reply))

    def _body(self, order: Order) -> dict[str, Any]:
        own = self._settings
        if (
            bool(own["image"]) == bool(own["template"])
            or not own["gpus"]
            or own["cloud"] not in ("SECURE", "COMMUNITY")
        ):
            raise ProviderError(
                REFUSED, "runpod.toml needs gpus, one of image and template, and cloud SECURE or COMMUNITY"
            )
        body: dict[str, Any] = {
            "name": order.label, "cloud": own["cloud"], "gpu": {"count": own["gpu_count"]},
            "env": contract.environment(own["environment"], own["pass"], order),
        }  # fmt: skip
        body |= {"image": own["image"]} if own["image"] else {"templateId": own["template"]}
        if own["disk_gb"]:
            body["disk"] = own["disk_gb"]
        if own["arguments"]:
            body["args"] = own["arguments"]
        if own["data_centers"]:
            body["dataCenterIds"] = own["data_centers"]
        if own["minimum_cuda"]:
            body["gpu"]["minCudaVersion"] = own["minimum_cuda"]
        if own["volume"]:
            body["mounts"] = {"network": [{"volumeId": own["volume"], "path": own["volume_path"]}]}
        return body

    def _candidates(self, limit: float) -> list[tuple[str, float]]:
        """GPU types in stock within the limit, in the configured order, with the price of all GPUs per hour."""
        own = self._settings
        query = {"include": "AVAILABILITY", "product": "POD", "count": own["gpu_count"], "cloud": own["cloud"]}
        found = self._get(f"/catalog/gpus?{urllib.parse.urlencode(query)}")
        types = found.get("gpus") if isinstance(found, dict) else None
        if not isinstance(types, list) or not all(isinstance(one, dict) for one in types):
            raise ProviderError(UNAVAILABLE, f"no list of GPU types in the answer: {clipped(found)}")
        known = {one.get("id"): one for one in types}
        fitting = []
        for gpu in own["gpus"]:
            prices = known.get(gpu, {}).get("price")
            single = number(prices.get(own["cloud"].lower())) if isinstance(prices, dict) else None
            if single and single * own["gpu_count"] <= limit and known[gpu].get("availability") != "NONE":
                fitting.append((str(gpu), single * own["gpu_count"]))
        return fitting

    def _within(self, made: str, order: Order, price: float) -> tuple[str, float]:
        """The new pod, unless it costs more than the catalog says and than the controller allows: then it goes."""
        if price <= order.max_price_per_hour:
            return made, price
        log(f"pod {made} costs ${price:g} per hour, above the limit: destroying it")
        try:
            contract.destroy_and_wait(self, made, order.label)
        except ProviderError as failure:
            raise ProviderError(
                OUTCOME_UNKNOWN, f"pod {made} costs ${price:g} per hour and exists: {failure}"
            ) from None
        raise ProviderError(NO_OFFER, f"the pod costs ${price:g} per hour, above ${order.max_price_per_hour:g}")

    def _get(self, path: str) -> Any:
        """The JSON of a request that changes nothing."""
        for pause in (1.0, 3.0, None):
            reply = self._send("GET", path, None)
            if reply.status == 200 and reply.data is not None:
                return reply.data
            if pause is None or 300 <= reply.status < 500:
                break
            log(f"GET {path}: {reply}; again in {pause:g} s")
            time.sleep(pause)
        raise ProviderError(UNAVAILABLE, f"GET {path}: {reply}")

    def _send(self, method: str, path: str, body: object) -> Reply:
        """One request. It is repeated only after 429, which says that it was not carried out."""
        for attempt in range(4):
            reply = self._once(method, path, body)
            if reply.status != 429 or attempt == 3:
                break
            pause = min(reply.retry_after if reply.retry_after is not None else 2.0 * 2**attempt, 60.0)
            log(f"RunPod limits the rate: again in {pause:g} s")
            time.sleep(pause)
        return reply

    def _once(self, method: str, path: str, body: object) -> Reply:
        headers = {"Accept": "application/json", "User-Agent": "podwatch", "Authorization": f"Bearer {self._key}"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
            with OPENER.open(request, timeout=SECONDS) as answer:
                status, text = answer.status, answer.read(LARGEST)
        except urllib.error.HTTPError as error:
            return _refusal(error)
        except urllib.error.URLError as error:
            refused = isinstance(error.reason, ConnectionRefusedError) or "Name or service" in str(error.reason)
            return Reply(detail=clipped(error.reason), sent=not refused)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Reply(detail=clipped(repr(error)))
        try:
            return Reply(status, json.loads(text) if text else None, "" if text else "an empty answer")
        except ValueError:
            return Reply(status, None, f"the answer is not whole: {clipped(text[:200].decode('utf-8', 'replace'))!r}")


def _refusal(error: urllib.error.HTTPError) -> Reply:
    try:
        text = error.read(4096).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        text = ""
    try:
        told = json.loads(text)
        detail = f"{told.get('detail') or told.get('title') or ''} {' '.join(map(str, told.get('errors') or []))}"
    except (ValueError, AttributeError, TypeError):
        detail = text
    after = error.headers.get("Retry-After", "")
    return Reply(error.code, None, clipped(detail), float(after) if after.isdigit() else None)


def _instance(pod: dict[str, Any]) -> Instance:
    name, status = pod.get("name"), pod.get("status")
    if not isinstance(pod.get("id"), str) or not isinstance(name, str):
        raise ProviderError(UNAVAILABLE, f"a pod without an id or a name: {clipped(pod)}")
    created = pod.get("createdAt")
    return Instance(
        id=pod["id"], label=name, state=STATES.get(status, "unknown") if isinstance(status, str) else "unknown",
        price_per_hour=number(pod.get("cost")), created_at=created if isinstance(created, str) else None,
        detail=clipped(f"{status}, actions {pod.get('actions')}"),
    )  # fmt: skip


if __name__ == "__main__":
    contract.serve("runpod.py", RunPod)
