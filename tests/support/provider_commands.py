"""A provider command for the tests, and the provider behind it: a JSON file that it locks.

    python provider_commands.py STATE.json list|create|destroy

STATE.json: ``account``, ``machines`` (id -> label, state, price), ``faults`` (verb -> a list of faults, one for each
call) and ``calls``. Faults: an exit code before anything happens, "after" (done, then exit 1), "hang" (done, then no
answer), "garbage", "empty", "twice" (creates two machines).
"""

import fcntl
import json
import sys
import time
from pathlib import Path
from typing import Any


def change(path: Path, do: Any) -> Any:
    with (path.parent / (path.name + ".lock")).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(path.read_text()) if path.exists() else {}
        for key, value in (("account", "me"), ("machines", {}), ("faults", {}), ("calls", [])):
            state.setdefault(key, value)
        answer = do(state)
        path.write_text(json.dumps(state))
        return answer


def act(state: dict[str, Any], verb: str, asked: dict[str, Any]) -> tuple[Any, Any]:
    fault = (state["faults"].get(verb) or [None]).pop(0)
    state["calls"].append([verb, asked])
    if isinstance(fault, int):
        return fault, None
    machines = state["machines"]
    if verb == "list":
        found = [
            {
                "id": i,
                "label": m["label"],
                "state": m["state"],
                "price_per_hour": m["price"],
                "created_at": None,
                "detail": "",
            }
            for i, m in machines.items()
        ]
        return fault, {"version": 1, "account": state["account"], "complete": True, "instances": found}
    if verb == "destroy":
        assert machines.get(asked["id"], asked)["label"] == asked["label"]
        machines.pop(asked["id"], None)
        return fault, {"version": 1, "id": asked["id"], "destroyed": True}
    for _ in range(2 if fault == "twice" else 1):
        number = f"m{1 + sum(c[0] == 'create' for c in state['calls'])}{len(machines)}"
        machines[number] = {"label": asked["label"], "state": "running", "price": 1.0}
    return fault, {"version": 1, "id": number, "label": asked["label"], "price_per_hour": 1.0}


def main() -> int:
    path, verb, asked = Path(sys.argv[1]), sys.argv[2], json.load(sys.stdin)
    fault, answer = change(path, lambda state: act(state, verb, asked))
    print("key=sk-live-0123456789abcdef", file=sys.stderr)
    if isinstance(fault, int):
        print("the provider says no", file=sys.stderr)
        return fault
    if fault == "hang":
        time.sleep(600)
    if fault in ("garbage", "empty"):
        sys.stdout.write("<html>502</html>" if fault == "garbage" else "")
        return 0
    if fault == "after":
        return 1
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
