"""The metrics: one table over the status document, for Prometheus and for podwatch's own W&B run.

Step numbers are values, never labels. A value that cannot be observed is omitted, not zero; ``podwatch_sensor_up`` then
shows the sensor as down.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import SensorState
from podwatch.domain.status_document import Overall, Status, TrainingState
from podwatch.report.daemon_view import DaemonView, ViewSource
from podwatch.report.status import status_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``value``: where a row has it, or how it follows from a row. ``rows``: the items of the document that
    have a sample each, empty for the document itself; ``labels``: the label's name and where a row has it."""

    name: str
    text: str
    value: str | Callable[[Any], float | None]
    rows: str | Callable[[Status], Iterable[Any]] = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    counts: bool = False
    """It only grows, and ends in ``_total`` for Prometheus."""

    def samples(self, status: Status) -> Iterator[tuple[list[str], float]]:
        """(values of the labels, value)"""
        for row in _rows(self.rows, status):
            value = _at(row, self.value) if isinstance(self.value, str) else self.value(row)
            if value is not None:
                yield [scrub(str(_at(row, path))) for path in self.labels.values()], float(value)


def _rows(rows: str | Callable[[Status], Iterable[Any]], status: Status) -> Iterable[Any]:
    found = rows(status) if callable(rows) else _at(status, rows) if rows else (status,)
    if isinstance(found, Mapping):
        return (SimpleNamespace(name=name, value=value) for name, value in sorted(found.items()))
    return found or ()


def _at(row: Any, path: str) -> Any:
    """What is at the dotted path; None where a part of it is None."""
    for name in path.split("."):
        row = None if row is None else getattr(row, name)
    return row


def _states(kinds: Iterable[Any], path: str) -> Callable[[Status], Iterable[Any]]:
    return lambda status: [SimpleNamespace(state=one, value=one is _at(status, path)) for one in kinds]


def _findings(status: Status) -> Iterable[Any]:
    """Open findings by kind; a reason that is none has no beginning."""
    counts = Counter((one.kind, one.severity) for one in status.reasons if one.since is not None)
    return [SimpleNamespace(kind=kind, severity=level, value=n) for (kind, level), n in sorted(counts.items())]


def _nodes(status: Status) -> Iterable[Any]:
    """Rank 0 has a row for each node as it has heard of it, the others for themselves: as many rows as nodes, and not
    their square. A node that has not reported has no row at rank 0."""
    leads = any(node.here and node.rank == 0 for node in status.nodes)
    return [node for node in status.nodes if leads or node.here]


def _money(status: Status) -> Iterable[Any]:
    money = None if status.account is None else status.account.money
    names = ("so_far", "lost", "at_end") if money else ()
    return [SimpleNamespace(kind=one, currency=_at(money, "currency"), value=_at(money, one)) for one in names]


def _finish(status: Status) -> Iterable[Any]:
    finish = None if status.account is None else status.account.finish_seconds
    return [SimpleNamespace(estimate=one, value=_at(finish, one)) for one in ("low", "high")] if finish else ()


_GPU: Final = {"gpu": "index", "uuid": "uuid"}
_NODE: Final = {"node": "rank", "host": "host"}
FAMILIES: Final = (
    Family(
        "podwatch_overall", "1 for the current overall state", "value", _states(Overall, "overall"), {"state": "state"}
    ),
    Family(
        "podwatch_training_state",
        "1 for the current training state",
        "value",
        _states(TrainingState, "training.state"),
        {"state": "state"},
    ),
    Family(
        "podwatch_sensor_up",
        "1 while the sensor can read its source",
        lambda one: None if one.state is SensorState.ABSENT else one.state is SensorState.OK,
        "sensors",
        {"sensor": "name"},
    ),
    Family("podwatch_findings", "Open findings", "value", _findings, {"kind": "kind", "severity": "severity"}),
    Family(
        "podwatch_paused",
        "1 while podwatch is paused and neither stops nor starts training",
        lambda one: one.daemon.pause is not None,
    ),
    Family(
        "podwatch_last_turn_timestamp_seconds",
        "When the sensing loop last ran",
        lambda one: one.daemon.last_turn_at or None,
    ),
    Family("podwatch_step", "Newest training step seen", "training.step"),
    Family("podwatch_step_timestamp_seconds", "When the newest training step was seen", "training.step_at"),
    Family("podwatch_step_duration_seconds", "Learned median duration of a step", "training.median_step_seconds"),
    Family("podwatch_steps_at_risk", "Steps lost if training died now", "training.steps_at_risk"),
    Family(
        "podwatch_training_figure",
        "The trainer's own figures",
        lambda one: float(one.value),
        "figures.values",
        {"figure": "name"},
    ),
    Family("podwatch_gpu_up", "1 while the device answers", lambda one: one.state == "ok", "gpus", _GPU),
    Family("podwatch_gpu_memory_used_bytes", "Device memory in use", "memory_used_bytes", "gpus", _GPU),
    Family("podwatch_gpu_memory_total_bytes", "Device memory", "memory_total_bytes", "gpus", _GPU),
    Family(
        "podwatch_gpu_utilization_ratio",
        "Share of time busy, 0 to 1",
        lambda one: None if one.utilization_percent is None else one.utilization_percent / 100,
        "gpus",
        _GPU,
    ),
    Family("podwatch_gpu_temperature_celsius", "Core temperature", "temperature_celsius", "gpus", _GPU),
    Family("podwatch_gpu_ecc_uncorrected", "Uncorrected ECC errors since driver load", "ecc_uncorrected", "gpus", _GPU),
    Family(
        "podwatch_inference_up",
        "1 while the health endpoint of the server answers ok",
        lambda one: one.health == "ok",
        "inference",
        {"url": "url"},
    ),
    Family("podwatch_disk_capacity_bytes", "Capacity of the output disk", "disk.capacity_bytes"),
    Family("podwatch_disk_free_bytes", "Free on the output disk", "disk.free_bytes"),
    Family("podwatch_disk_inodes_free", "Free inodes on the output disk", "disk.inodes_free"),
    Family("podwatch_disk_next_save_bytes", "Predicted size of the next save", "disk.next_save_bytes"),
    Family("podwatch_host_memory_available_bytes", "Available memory of the machine", "host.memory_available_bytes"),
    Family("podwatch_host_memory_total_bytes", "Memory of the machine", "host.memory_total_bytes"),
    Family("podwatch_shm_used_bytes", "Used of /dev/shm", "host.shm_used_bytes"),
    Family("podwatch_shm_total_bytes", "Size of /dev/shm", "host.shm_total_bytes"),
    Family(
        "podwatch_container_memory_used_bytes",
        "Memory used in the cgroup of training, without page cache",
        "host.container_used_bytes",
    ),
    Family(
        "podwatch_container_memory_limit_bytes", "Memory limit of the cgroup of training", "host.container_limit_bytes"
    ),
    Family(
        "podwatch_container_oom_kills", "OOM kills in the cgroup of training since it was created", "host.oom_kills"
    ),
    Family(
        "podwatch_open_files_ratio",
        "Open files of the process nearest to its limit, 0 to 1",
        lambda one: one.host.files.open / one.host.files.limit if _at(one, "host.files") else None,
    ),
    Family("podwatch_checkpoint_step", "Newest complete step here", "checkpoints.newest_complete_step"),
    Family(
        "podwatch_checkpoint_timestamp_seconds",
        "When the newest complete checkpoint was written",
        "checkpoints.newest_complete_at",
    ),
    Family("podwatch_backup_configured", "1 when a store is configured", lambda one: bool(one.sync.store_url)),
    Family("podwatch_store_up", "1 while the store answers", "sync.ok"),
    Family("podwatch_published_step", "Newest step in the store", "sync.last_step"),
    Family(
        "podwatch_last_published_timestamp_seconds", "When a checkpoint was last published", "sync.last_published_at"
    ),
    Family("podwatch_upload_bytes", "Size of the upload in progress", lambda one: one.sync.total_bytes or None),
    Family(
        "podwatch_upload_done_bytes",
        "Bytes already sent of the upload in progress",
        lambda one: one.sync.uploaded_bytes if one.sync.total_bytes else None,
    ),
    Family(
        "podwatch_store_calls",
        "Calls to the store by class (a is free)",
        "value",
        "sync.calls",
        {"class": "name"},
        counts=True,
    ),
    Family("podwatch_nodes", "Nodes of the run", "node_count"),
    Family("podwatch_node_report_age_seconds", "Time since the node's last report", "silent_seconds", _nodes, _NODE),
    Family("podwatch_node_step", "Newest training step seen on the node", "step", _nodes, _NODE),
    Family("podwatch_restarts", "Restarts of the trainer by podwatch", "counters.restarts", counts=True),
    Family("podwatch_uploaded_bytes", "Bytes of published checkpoints", "counters.uploaded_bytes", counts=True),
    Family(
        "podwatch_incidents",
        "Failures of the run",
        "value",
        "counters.incidents",
        {"kind": "name"},
        counts=True,
    ),
    Family("podwatch_events", "Events recorded", "value", "counters.events", {"name": "name"}, counts=True),
    Family("podwatch_goodput_ratio", "Share of the time that no failure took, 0 to 1", "account.goodput_ratio"),
    Family("podwatch_finish_seconds", "Time to the target step", "value", _finish, {"estimate": "estimate"}),
    Family(
        "podwatch_money",
        "Cost of the run by [cost] per_hour",
        "value",
        _money,
        {"kind": "kind", "currency": "currency"},
    ),
)


class StatusCollector:
    """Builds all metric families from the status as of each scrape."""

    def __init__(self, source: ViewSource) -> None:
        self._source = source

    def collect(self) -> "Iterator[Metric]":
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        status = status_of(self._source())
        yield InfoMetricFamily("podwatch_build", "Version of podwatch", {"version": str(_at(status, "daemon.version"))})
        for one in FAMILIES:
            kind = CounterMetricFamily if one.counts else GaugeMetricFamily
            family = kind(one.name, one.text, labels=list(one.labels))
            for labels, value in one.samples(status):
                family.add_metric(labels, value)
            if family.samples or one.labels:  # of a labelled one the samples come and go
                yield family


def make_registry(source: ViewSource) -> "CollectorRegistry":
    """The library is imported here: a daemon that nobody scrapes does without its 1.3 MiB."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(source))  # any object with ``collect``
    return registry


def exposition(registry: "CollectorRegistry") -> bytes:
    """The metrics in text format 0.0.4, which every Prometheus reads."""
    from prometheus_client.exposition import generate_latest

    return generate_latest(registry)


def for_wandb(view: DaemonView) -> dict[str, float]:
    """Those that have one value, and those of each GPU."""
    status, found = status_of(view), {}
    for one in FAMILIES:
        for labels, value in one.samples(status) if not one.labels or one.rows == "gpus" else ():
            _, _, name = one.name.partition("_")
            found["/".join(["podwatch", name, *labels[:1]])] = value
    return found
