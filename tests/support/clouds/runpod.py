"""RunPod's REST API v2 as of November 2026: account, catalog, pods. Unknown fields of a request are refused (422)."""

import itertools
from typing import Any

from tests.support.clouds.http import Cloud, Reply

FIELDS = {"name", "image", "templateId", "gpu", "cpu", "cloud", "disk", "mounts", "env", "ports", "args", "registry",
          "dataCenterIds", "globalNetworking", "startJupyter", "startSsh"}  # fmt: skip


class RunPodCloud(Cloud):
    def __init__(self, account: str = "user_2abc") -> None:
        super().__init__()
        self.account = account
        self.types: dict[str, dict[str, Any]] = {}
        self._ids = itertools.count(1)

    def stock(self, gpu: str, price: float, availability: str = "HIGH") -> None:
        self.types[gpu] = {
            "id": gpu, "name": gpu, "pool": None, "manufacturer": "NVIDIA", "memory": 24, "secure": True,
            "community": True, "price": {"secure": price, "community": price * 0.8},
            "maxCount": {"secure": 8, "community": 4}, "availability": availability,
        }  # fmt: skip

    def rent(self, name: str, status: str = "RUNNING", **more: Any) -> str:
        number = f"pod{next(self._ids):05d}"
        self.instances[number] = {
            "id": number, "name": name, "status": status, "actions": ["stop", "restart", "terminate"], "cost": 0.44,
            "cloud": "SECURE", "image": "img", "env": {}, "createdAt": "2026-11-23T10:00:00Z", "startedAt": None,
        } | more  # fmt: skip
        return number

    def serve(self, method: str, path: str, query: dict[str, str], body: Any) -> Reply:
        match method, path.strip("/").split("/"):
            case "GET", ["v2", "account"]:
                return 200, {"id": self.account, "email": None}
            case "GET", ["v2", "catalog", "gpus"]:
                if query.get("include") != "AVAILABILITY" or query.get("product") != "POD":
                    return 400, _problem(400, "include and product")
                return 200, {"gpus": list(self.types.values())}
            case "GET", ["v2", "pods"]:
                return 200, {"pods": list(self.instances.values())}
            case "POST", ["v2", "pods"]:
                return self._create(body)
            case "DELETE", ["v2", "pods", number]:
                return (204, "") if self.instances.pop(number, None) else (404, _problem(404, "pod not found"))
        return 404, _problem(404, "resource not found")

    def _create(self, body: dict[str, Any]) -> Reply:
        unknown = [f"$: additional properties '{name}' not allowed" for name in body.keys() - FIELDS]
        if unknown or not body.get("name") or not (body.get("image") or body.get("templateId")):
            return 422, _problem(422, "Request validation failed.") | {"errors": unknown}
        gpu = body["gpu"]
        known = self.types.get(gpu["id"])
        if known is None or known["availability"] in ("NONE", "GONE"):
            return 400, _problem(400, "no capacity")
        cost = known["price"][body["cloud"].lower()] * gpu["count"] * known.get("surcharge", 1.0)
        made = self.rent(body["name"], "PROVISIONING", cost=cost, env=body.get("env", {}))
        return 201, self.instances[made]


def _problem(status: int, detail: str) -> dict[str, Any]:
    return {"title": "Problem", "status": status, "detail": detail}
