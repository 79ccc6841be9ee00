"""A simulated night as /metrics shows it: podwatch's own exposition of a view a minute. A restart, an hour without the
store, a podwatch that is down for ten minutes, a crash loop, and the end: podwatch gives up."""

from collections.abc import Iterator
from dataclasses import replace

from podwatch.app.backup_findings import backup_findings
from podwatch.domain.snapshot import (
    FileUse,
    HostSample,
    LogMatch,
    ProgressSample,
    ProgressSource,
    TrainingMetrics,
    observed,
)
from podwatch.domain.stored_checkpoint import StoredCheckpoint
from podwatch.report.daemon_view import Counters, DaemonView
from podwatch.report.metrics import exposition, make_registry
from tests.report import views
from tests.report.views import GB, GIB, NOW

MINUTES = 480
START = views.WALL - MINUTES * 60
LABELS = 'job="podwatch",instance="pod-7:9477",run="bs4"'
DEAD = range(120, 127)
UNREACHABLE = range(150, 160)
NO_STORE = range(180, 340)
CRASHING = range(360, 376)
GAVE_UP = range(420, MINUTES + 1)


def base(minute: int) -> DaemonView:
    """What the pod looks like, without its numbers."""
    if minute in GAVE_UP:
        return views.gave_up()
    if minute in CRASHING:
        return views.waiting()
    if minute in DEAD:
        return views.dead_recovering()
    return views.after_recovery() if minute >= DEAD.stop else views.healthy()


def view(minute: int) -> DaemonView:
    wall = START + minute * 60
    step = 20 + min(minute, GAVE_UP.start) // 4
    saved = step // 5 * 5
    stored = 20 + min(minute, NO_STORE.start) // 4 // 5 * 5 if minute in NO_STORE else saved
    here = base(minute)
    gpus = here.facts.pod.gpus.value or ()
    host = HostSample(
        256 * GIB, (200 - minute // 8) * GIB, 8 * GIB, minute << 20, 64 * GIB, 20 * GIB, 240 * GIB, 90 * GIB, 0,
        files=(FileUse(4242, "python", 900 + minute, 65_536),), xids_watched=True,
    )  # fmt: skip
    snapshot = replace(
        here.facts.pod,
        wall=wall,
        gpus=replace(here.facts.pod.gpus, value=tuple(replace(g, ecc_uncorrected=0) for g in gpus)),
        host=observed(host, NOW),
        training=observed((TrainingMetrics(step, NOW, (("reward", step / 200), ("entropy", 0.4))),), NOW),
        logs=observed((LogMatch("api-connection-errors", "trainer", minute % 3, NOW - 60, NOW),), NOW),
    )
    if minute not in GAVE_UP:
        newest = ProgressSample(ProgressSource.STEP_LINE, "trainer", NOW - 60 * (minute % 4), step)
        snapshot = replace(snapshot, progress=observed((newest,), NOW))
    sync = replace(
        views.healthy().sync,
        ok=minute not in NO_STORE,
        error="timed out" if minute in NO_STORE else "",
        last_step=stored,
        last_published_wall=START + (min(minute, NO_STORE.start) if minute in NO_STORE else minute) // 20 * 1200,
        uploading_step=saved,
        uploaded_bytes=minute % 20 * 2 * GB,
        checkpoints=(StoredCheckpoint(stored, f"s{stored}", here=f"s{stored}"),),
        upload_rate=15e6,
        calls={"A": minute * 10, "B": minute * 2, "C": minute // 10},
    )
    checkpoints = tuple(views.checkpoint(s) for s in (saved - 5, saved))
    checkpoints = tuple(replace(c, changed_wall=START + (c.step - 20) * 240.0) for c in checkpoints)
    lag = backup_findings(sync, checkpoints, now=NOW, wall=wall, max_lag=3600.0, since=0.0)
    restarts = (minute >= DEAD.stop) + max(0, min(minute, CRASHING.stop) - CRASHING.start) // 3
    counters = Counters(
        turns=minute * 30, restarts=restarts, published=minute // 20, uploaded_bytes=minute // 20 * 47 * GB,
        skipped=minute // 100, abandoned=minute // 200, pruned=minute // 25,
        incidents={"silent-death": 1, "trainer-exited": restarts - 1} if restarts else {},
        events={"published": minute // 20, "upload-skipped": minute // 100, "pruned": minute // 25},
    )  # fmt: skip
    nodes = views.gang(ended=minute in GAVE_UP).nodes[:2]
    if minute not in DEAD:
        nodes = tuple(replace(node, silent_seconds=0.9) for node in nodes)
    return views.changed(
        here, nodes=nodes, node_count=2, snapshot=snapshot,
        sync=sync, counters=counters, checkpoints=checkpoints, steps_at_risk=step - saved,
        findings=(*here.findings, *lag), now_wall=wall, started_wall=START - 600,
    )  # fmt: skip


def metrics(minute: int) -> str:
    return exposition(make_registry(lambda: view(minute))).decode()


def openmetrics() -> Iterator[str]:
    """The night's samples with their times, as promtool backfills them. A scrape that failed leaves only ``up``."""
    for minute in range(MINUTES + 1):
        at = START + minute * 60
        up = minute not in UNREACHABLE
        yield f"up{{{LABELS}}} {int(up)} {at}"
        for line in metrics(minute).splitlines() if up else ():
            if not line.startswith("#"):
                series, _, value = line.rpartition(" ")
                name, brace, rest = series.partition("{")
                yield f"{name}{{{LABELS}{',' + rest if brace else '}'} {value} {at}"
    yield "# EOF"
