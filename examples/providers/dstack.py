#!/usr/bin/env python3
"""dstack for ``podwatch controller``: create = ``dstack apply`` of one task (docs/controller.md).

Where dstack's own retry is an option, use it instead: examples/engines/dstack.yml. Needs `dstack` with its project,
contract.py beside it, and dstack.toml. Secrets are dstack's: `${{ secrets.name }}` in the task's file.
"""

from pathlib import Path
from typing import Any

import contract
from contract import OUTCOME_UNKNOWN, REFUSED, UNAVAILABLE, Instance, Order, ProviderError, clipped, number

DEFAULTS: dict[str, Any] = {
    "file": "task.dstack.yml",  # relative to dstack.toml; with idle_duration: 0s, so that no idle machine is billed
    "environment": {},
}
STATES = {
    "pending": "pending",
    "submitted": "pending",
    "provisioning": "pending",
    "running": "running",
    "terminated": "ended",
    "failed": "ended",
    "done": "ended",
}
"""Everything else, `terminating` included, is unknown: it may still be billed."""
PREFIX = "podwatch-"
LONGEST_NAME = 41


class Dstack:
    def __init__(self) -> None:
        self._settings = contract.settings("dstack", DEFAULTS)

    def account(self) -> str:
        project = self._runs()[0]
        return f"dstack:{project}"

    def instances(self) -> list[Instance]:
        return [_instance(row) for row in self._runs()[1]]

    def _runs(self) -> tuple[str, list[dict[str, Any]]]:
        """The project, and all runs that are not finished."""
        done = contract.run(["dstack", "ps", "--json"])
        found = contract.parsed(done.stdout) if done.returncode == 0 else None
        project, runs = (found.get("project"), found.get("runs")) if isinstance(found, dict) else (None, None)
        if not isinstance(project, str) or not project or not isinstance(runs, list):
            raise ProviderError(UNAVAILABLE, f"dstack ps: {clipped(done.stderr or done.stdout)}")
        if not all(isinstance(row, dict) for row in runs):
            raise ProviderError(UNAVAILABLE, f"dstack ps has another form: {clipped(runs)}")
        return project, runs

    def create(self, order: Order) -> tuple[str, float]:
        own, name = self._settings, contract.name_of(order.label, PREFIX)
        if len(name) > LONGEST_NAME or name != name.lower() or not name.replace("-", "").isalnum():
            raise ProviderError(
                REFUSED, f"dstack does not accept the name {name}: shorten the run id to a-z, 0-9 and -"
            )
        words = [f"--env={key}={value}" for key, value in {**own["environment"], **order.environment}.items()]
        price = order.max_price_per_hour
        file = str(Path(own["directory"]) / own["file"])
        done = contract.run(["dstack", "apply", "-y", "-d", "-f", file, "-n", name, f"--max-price={price}", *words])
        if done.returncode:
            raise ProviderError(OUTCOME_UNKNOWN, f"dstack apply: {clipped(done.stderr or done.stdout)}")
        return name, price  # the machine is not chosen yet: the list shows its price later

    def destroy(self, instance: Instance) -> None:
        done = contract.run(["dstack", "stop", "-y", instance.id])
        if done.returncode:
            raise ProviderError(UNAVAILABLE, f"dstack stop: {clipped(done.stderr or done.stdout)}")


def _instance(row: dict[str, Any]) -> Instance:
    spec, status = row.get("run_spec"), row.get("status")
    name = spec.get("run_name") if isinstance(spec, dict) else None
    if not isinstance(name, str) or not isinstance(status, str):
        raise ProviderError(UNAVAILABLE, f"a run without a name or status: {clipped(row)}")
    submission: Any = row.get("latest_job_submission") or {}
    machine: Any = submission.get("job_provisioning_data") if isinstance(submission, dict) else None
    price = number(machine.get("price")) if isinstance(machine, dict) else 0.0  # no machine yet: nothing is billed
    at = row.get("submitted_at")
    created = at if isinstance(at, str) else None
    return Instance(name, contract.label_of(name, PREFIX), STATES.get(status, "unknown"), price, created, status)


if __name__ == "__main__":
    contract.serve("dstack.py", Dstack)
