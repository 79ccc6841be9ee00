"""A daemon's outside without its inside: the real control socket, HTTP server and endpoint file around given views.

Run as ``python -m tests.cli.fake_daemon RUNTIME_DIR STATE``; prints ``ready`` once it can be reached.
"""

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from podwatch.api.control_socket import ControlServer
from podwatch.api.http_endpoints import HttpServer
from podwatch.domain.errors import Busy
from podwatch.domain.event import Event, EventName
from podwatch.report.daemon_view import DaemonView
from podwatch.report.json_documents import event_document, incident_document
from podwatch.report.status import build_status
from podwatch.system.endpoint import CONTROL, SNAPSHOT, own_endpoint, write_document, write_endpoint
from tests.report import views


async def serve(root: Path, state: str) -> None:
    run = root / "bs4-qwen3-8b"
    run.mkdir(parents=True, exist_ok=True)
    view = replace(views.ALL[state](), pid=os.getpid())
    events = [Event(EventName.PUBLISHED, time.time() - 60, "step 80 is in the store", id=7)]
    calls: list[tuple[str, dict]] = []

    async def status(params: dict) -> dict:
        return build_status(view)

    async def acted(params: dict) -> dict:
        calls.append(("act", params))
        return {"message": f"restarting from step {params.get('step')}"}

    async def refuse(params: dict) -> dict:
        raise Busy("a save is in flight", where="step 85", fix="try again in a minute")

    async def plan(params: dict) -> dict:
        return {
            "step": 80,
            "reason": "newest complete",
            "argv": ["uv", "run", "rl", "@", "my config.toml"],
            "cwd": "/app",
            "user": "",
            "environment_names": ["WANDB_API_KEY"],
            "set_aside": ["/app/outputs/checkpoints/step_85"],
        }

    async def prune_plan(params: dict) -> dict:
        entry = {"step": 80, "path": "", "action": "remove", "reason": "stored", "size_bytes": 47 * views.GB}
        return {"entries": [entry], "message": "would free 47 GB"}

    async def list_events(params: dict) -> dict:
        return {"events": [event_document(e) for e in events if e.id > params["after_id"]]}

    async def list_incidents(params: dict) -> dict:
        return {
            "incidents": [incident_document(views.incident(resolved=True)).to_json()]
            if params["id"] in (None, 1)
            else []
        }

    async def checkpoints(params: dict) -> dict:
        return {"sets": build_status(view)["checkpoints"]["sets"]}

    async def verify(params: dict) -> dict:
        return {"steps": [{"step": 85, "sound": False, "reasons": ["trainer/0.distcp is cut off"]}]}

    handlers = {
        "status": status,
        "start": acted,
        "restart": acted,
        "restart_plan": plan,
        "stop_training": refuse,
        "prune_plan": prune_plan,
        "events": list_events,
        "incidents": list_incidents,
        "checkpoints": checkpoints,
        "verify": verify,
    }

    class Shown:
        def view(self) -> DaemonView:
            return view

        async def events(self, after_id: int, limit: int) -> list[Event]:
            return events

        async def history(self):
            return ()

        def log_lines(self):
            return ()

        def ping(self, role: str) -> None: ...

        def live(self) -> tuple[bool, str]:
            return True, ""

        def ready(self) -> tuple[bool, list[str]]:
            return True, []

    http = HttpServer("127.0.0.1", 0, Shown(), "t")
    url = await http.start()
    control = ControlServer(run / CONTROL, handlers)
    await control.start()
    write_document(run / SNAPSHOT, build_status(view))
    write_endpoint(run, own_endpoint("bs4-qwen3-8b", started_wall=time.time(), http_url=url))
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))


if __name__ == "__main__":
    main()
