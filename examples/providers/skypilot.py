#!/usr/bin/env python3
"""SkyPilot for ``podwatch controller``: create = ``sky launch`` of one task (docs/controller.md).

For people whose machines come from `sky launch` by hand. Where SkyPilot's managed jobs are an option, use them instead:
examples/engines/skypilot.yaml. Needs `sky` and its API server's state, contract.py beside it, and skypilot.toml.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import contract
from contract import NO_OFFER, OUTCOME_UNKNOWN, UNAVAILABLE, Instance, Order, ProviderError, clipped

DEFAULTS: dict[str, Any] = {
    "file": "task.yaml",  # relative to skypilot.toml
    "price_per_hour": 0.0,  # of the task's resources: SkyPilot has no price limit and shows no price
    "environment": {},
    "pass": [],  # secrets of the task: `secrets: {NAME: null}` in its file
}
STATES = {"PENDING": "pending", "INIT": "pending", "UP": "running", "STOPPED": "stopped", "AUTOSTOPPING": "running"}
PREFIX = "podwatch-"


class SkyPilot:
    def __init__(self) -> None:
        self._settings = contract.settings("skypilot", DEFAULTS)

    def account(self) -> str:
        """SkyPilot's list is its own database: another machine or server has another one, in which nothing runs."""
        try:
            user = (Path.home() / ".sky" / "user_hash").read_text().strip()
        except OSError as error:
            raise ProviderError(UNAVAILABLE, f"SkyPilot was never used here: {error}") from None
        if not user:
            raise ProviderError(UNAVAILABLE, "SkyPilot's user_hash is empty")
        return f"skypilot:{user}:{os.environ.get('SKYPILOT_API_SERVER_ENDPOINT') or 'local'}"

    def instances(self) -> list[Instance]:
        done = contract.run(["sky", "status", "--refresh", "--output", "json"])
        found = contract.parsed(done.stdout) if done.returncode == 0 else None
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ProviderError(UNAVAILABLE, f"sky status: {clipped(done.stderr or done.stdout)}")
        return [self._instance(row) for row in found]

    def _instance(self, row: dict[str, Any]) -> Instance:
        name, status = row.get("name"), row.get("status")
        if not isinstance(name, str) or not isinstance(status, str):
            raise ProviderError(UNAVAILABLE, f"a cluster without a name or status: {clipped(row)}")
        price = float(self._settings["price_per_hour"])
        return Instance(name, contract.label_of(name, PREFIX), STATES.get(status, "unknown"), price, None, status)

    def create(self, order: Order) -> tuple[str, float]:
        own, name = self._settings, contract.name_of(order.label, PREFIX)
        price = float(own["price_per_hour"])
        if not 0 < price <= order.max_price_per_hour:
            raise ProviderError(NO_OFFER, f"price_per_hour of skypilot.toml is {price:g}: above the limit, or not set")
        words = [f"--env={key}={value}" for key, value in {**own["environment"], **order.environment}.items()]
        secrets = contract.environment({}, own["pass"], Order(order.label, price))
        words += [f"--secret={key}" for key in secrets]  # the value comes from the environment
        task = str(Path(own["directory"]) / own["file"])
        done = contract.run(
            ["sky", "launch", "--yes", "--async", "--detach-run", "--cluster", name, *words, task], secrets
        )
        if done.returncode:
            raise ProviderError(OUTCOME_UNKNOWN, f"sky launch: {clipped(done.stderr or done.stdout)}")
        return name, price

    def destroy(self, instance: Instance) -> None:
        done: subprocess.CompletedProcess[str] = contract.run(["sky", "down", "--yes", instance.id])
        if done.returncode:
            raise ProviderError(UNAVAILABLE, f"sky down: {clipped(done.stderr or done.stdout)}")


if __name__ == "__main__":
    contract.serve("skypilot.py", SkyPilot)
