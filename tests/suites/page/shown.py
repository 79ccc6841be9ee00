"""A podwatch without a pod behind the page, and the states in which a page is looked at."""

import math
from dataclasses import replace
from typing import Any

from podwatch.api.http_endpoints import HttpServer
from podwatch.domain.event import Event
from podwatch.domain.facts import Facts
from podwatch.domain.run_state import RunState
from podwatch.domain.snapshot import Desired, Snapshot, observed
from podwatch.domain.status_document import RecoveryView
from podwatch.recording.last_day import Moment
from podwatch.report.daemon_view import DaemonView
from tests.report import views
from tests.report.views import GB, GIB, NOW, WALL


class Shown:
    """Each request gets the next view; the last one stays."""

    def __init__(
        self, *shown: object, lines: tuple[str, ...] = (), day: tuple[Moment, ...] = (), password: str = ""
    ) -> None:
        self.shown, self.lines, self.day, self.asked = list(shown), lines, day, 0
        self.server = HttpServer(
            "127.0.0.1", 0, self, "t", password=password, seconds=600.0
        )  # a busy machine takes longer than a client may

    def view(self) -> Any:
        self.asked += 1
        view = self.shown[min(self.asked, len(self.shown)) - 1]
        if view is None:
            raise RuntimeError("no view")
        return view

    async def history(self):
        return self.day

    def log_lines(self) -> tuple[str, ...]:
        return self.lines

    async def events(self, after_id: int, limit: int) -> list[Event]:
        return []

    def ping(self, role: str) -> None: ...

    def live(self) -> tuple[bool, str]:
        return True, ""

    def ready(self) -> tuple[bool, list[str]]:
        return True, []


def blocked() -> DaemonView:
    """Down; another user's process holds the memory of GPU 0."""
    return replace(
        views.down(ended=True),
        recovery=RecoveryView(
            phase="blocked", blocked=True, detail="GPU 0 still has 68.4 GiB in use by python3 (pid 4242, user eva)"
        ),
        incident=views.incident(resolved=False, cause=views.crash()),
        incidents=(views.incident(resolved=False, cause=views.crash()), views.incident(resolved=True)),
    )


def finished() -> DaemonView:
    view = views.healthy()
    snapshot = replace(view.facts.pod, trainer=observed(views.trainer(alive=False, exit_code=0), NOW))
    return views.changed(
        view, snapshot=replace(snapshot, desired=Desired.FINISHED), desired=Desired.FINISHED,
        recovery=RecoveryView(phase="finished", detail="exit 0 at the target step"), target_step=85, findings=(),
    )  # fmt: skip


def new_pod() -> DaemonView:
    """podwatch has just been started: no reading, no checkpoint, no store, no step."""
    return DaemonView(
        version="0.1.0",
        run_id="bs4-qwen3-8b",
        facts=Facts(Snapshot(at=NOW, wall=WALL), RunState("bs4-qwen3-8b")),
        now=NOW,
        now_wall=WALL,
    )


STATES = {
    "good": lambda: replace(views.healthy(), incidents=(views.incident(resolved=True),)),
    "degraded": views.not_backed_up,
    "dead": views.dead_recovering,
    "gave-up": views.gave_up,
    "blocked": blocked,
    "finished": finished,
    "new-pod": new_pod,
    "nodes": views.gang,
    "nodes-ended": views.ALL["nodes-ended"],
}


def day(gpus: int = 2) -> tuple[Moment, ...]:
    """A night: training, two deaths, a gap without podwatch, a stop, an outage of 40 min. It ends as
    ``views.healthy`` is now: the figures of one page agree."""
    found = []
    for minute in range(1440, -1, -1):
        use, step = "running", 85 - (minute + 3) // 4
        made = (1440 - minute) / 4
        if minute in range(900, 904) or minute in range(300, 303):
            use = "recovering"
        elif minute in range(600, 690):
            continue
        elif minute in range(440, 500):
            use = "stopped"
        elif minute in range(100, 140):
            use = "down"
        elif minute in range(60, 75):
            use = "evaluating"
        up = use in ("running", "evaluating")
        at = WALL - 60 * minute
        found.append(
            Moment(
                at, use, minute in (902, 301, 99),
                tuple((n, (71 - 7 * n if up else 0) * GIB, 80 * GIB) for n in range(gpus)),
                (int((100 + (80 - minute) % 200 / 2) * GB), 250 * GB), 52 * GB, step,
                at - 60 * (-minute % 4) + 7 * math.sin(step),
                0.2 + 0.3 * (1 - math.exp(-made / 200)) + 0.03 * math.sin(step), 1.2 * math.exp(-made / 250) + 0.1,
            )
        )  # fmt: skip
    return tuple(found)
