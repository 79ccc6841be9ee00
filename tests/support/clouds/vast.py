"""Vast.ai's API as of August 2026: account, search, create, list, destroy."""

import itertools
import json
import operator
from collections.abc import Callable
from typing import Any

from tests.support.clouds.http import Cloud, Reply

OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "neq": operator.ne, "gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le,
    "in": lambda have, want: have in want, "notin": lambda have, want: have not in want,
}  # fmt: skip
PAGE = 25


class VastCloud(Cloud):
    def __init__(self, account: int = 4242) -> None:
        super().__init__()
        self.account = account
        self.offers: dict[int, dict[str, Any]] = {}
        self._ids = itertools.count(7_000_001)

    def offer(self, number: int, price: float, **more: Any) -> None:
        """``price`` with the disk. ``min_bid`` is half of it."""
        self.offers[number] = {
            "id": number, "dph_total": price, "min_bid": price / 2, "storage_cost": 0.15, "gpu_name": "RTX 4090",
            "num_gpus": 2, "reliability": 0.99, "verified": True, "external": False, "rentable": True, "rented": False,
        } | more  # fmt: skip

    def rent(self, label: str | None, status: str | None = "running", **more: Any) -> str:
        """An instance that somebody rented before."""
        number = next(self._ids)
        self.instances[str(number)] = {
            "id": number, "label": label, "actual_status": status, "intended_status": "running", "cur_state": "running",
            "next_state": "running", "status_msg": "success, running img", "dph_total": 0.42,
            "start_date": 1_790_000_000.0, "extra_env": [], "machine_id": 1, "gpu_name": "RTX 4090",
        } | more  # fmt: skip
        return str(number)

    def serve(self, method: str, path: str, query: dict[str, str], body: Any) -> Reply:
        match method, path.strip("/").split("/"):
            case "GET", ["api", "v0", "users", "current"]:
                return 200, {"id": self.account, "email": "me@example.org", "api_key": self.KEY}
            case "GET", ["api", "v1", "instances"]:
                return self._list(query)
            case "POST", ["api", "v0", "bundles"]:
                return self._search(body)
            case "PUT", ["api", "v0", "asks", number]:
                return self._create(int(number), body)
            case "DELETE", ["api", "v0", "instances", number]:
                if self.instances.pop(number, None) is None:
                    return 404, {"success": False, "error": "no_such_instance", "msg": "no such instance"}
                return 200, {"success": True}
        return 404, "404: Not Found"

    def unauthorized(self) -> Reply:
        return 401, {"success": False, "error": "auth_error", "msg": "Invalid user key"}

    def _list(self, query: dict[str, str]) -> Reply:
        filters = json.loads(query.get("select_filters") or "{}")
        rows = [row for _, row in sorted(self.instances.items()) if _matches(row, filters)]
        after = int(query.get("after_token") or 0)
        rest = [row for row in rows if row["id"] > after]
        page = rest[: min(int(query.get("limit") or PAGE), PAGE)]
        token = str(page[-1]["id"]) if len(page) < len(rest) else None
        return 200, {"success": True, "instances": page, "next_token": token, "total_instances": len(rows)}

    def _search(self, body: dict[str, Any]) -> Reply:
        filters = {name: ops for name, ops in body.items() if isinstance(ops, dict)}
        rows = [dict(row) for row in self.offers.values() if _matches(row, filters)]
        for name, direction in reversed(body.get("order") or []):
            rows.sort(key=lambda row: row.get(name) or 0, reverse=direction == "desc")
        return 200, {"success": True, "offers": rows[: int(body.get("limit") or 64)]}

    def _create(self, number: int, body: dict[str, Any]) -> Reply:
        if number not in self.offers:
            return 404, {"success": False, "error": "no_such_ask", "msg": f"no such ask {number}"}
        if body.get("client_id") != "me" or not (body.get("image") or body.get("template_hash_id")):
            return 400, {"success": False, "error": "invalid_args", "msg": "image is required"}
        if not isinstance(body.get("env"), dict) or body.get("disk", 0) < 8 or len(body.get("label") or "") > 256:
            return 400, {"success": False, "error": "invalid_args", "msg": "env, disk or label"}
        offer, bid = self.offers[number], body.get("price")
        low = bid is not None and bid < offer["min_bid"]
        if low and body.get("cancel_unavail"):
            return 410, {"success": False, "error": "no_longer_available", "msg": "the bid is too low"}
        del self.offers[number]
        made = self.rent(body["label"], None, dph_total=bid or offer["dph_total"], extra_env=list(body["env"].items()))
        if not low:
            return 200, {"success": True, "new_contract": int(made)}
        self.instances[made] |= dict.fromkeys(
            ("actual_status", "intended_status", "cur_state", "next_state"), "stopped"
        )
        return 200, {"success": False, "error": "bid_too_low", "msg": "created stopped", "new_contract": int(made)}


def _matches(row: dict[str, Any], filters: dict[str, dict[str, Any]]) -> bool:
    return all(_holds(row.get(name), op, value) for name, ops in filters.items() for op, value in ops.items())


def _holds(have: Any, op: str, want: Any) -> bool:
    """vastai sends the numbers of a query as text."""
    if isinstance(have, (int, float)) and isinstance(want, str):
        want = float(want)
    return have is not None and OPERATORS[op](have, want)
