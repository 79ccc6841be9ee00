"""Prometheus metrics from the DaemonView, on a separate registry.

Step numbers are values, never labels. A value that cannot be observed is omitted, not zero; ``podwatch_sensor_up`` then
shows the sensor as down.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from podwatch.domain.secrets import scrub
from podwatch.domain.snapshot import Health, SensorState
from podwatch.domain.status_document import Overall, TrainingState
from podwatch.policy.run_cost import Account
from podwatch.reporting.daemon_view import DaemonView, ViewSource

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class ViewCollector(Collector):
    """Builds all metric families from the newest view at each scrape."""

    def __init__(self, source: ViewSource) -> None:
        self._source = source

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        view = self._source()
        yield InfoMetricFamily("podwatch_build", "Version of podwatch", {"version": view.version})
        yield from _states(view)
        yield from _progress(view)
        yield from _gpus(view)
        yield from _inference(view)
        yield from _disk(view)
        yield from _host(view)
        yield from _figures(view)
        yield from _backups(view)
        yield from _nodes(view)
        yield from _counters(view)
        yield from _account(view.account)


def make_registry(source: ViewSource) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ViewCollector(source))
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The metrics in text format 0.0.4, which every Prometheus reads."""
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float | None) -> Iterable[Metric]:
    if value is not None:
        yield GaugeMetricFamily(name, text, value=float(value))


def _states(view: DaemonView) -> Iterable[Metric]:
    judged = view.judgement()
    family = GaugeMetricFamily("podwatch_overall", "1 for the current overall state", labels=["state"])
    for overall in Overall:
        family.add_metric([overall], float(overall is judged.overall))
    yield family
    family = GaugeMetricFamily("podwatch_training_state", "1 for the current training state", labels=["state"])
    for state in TrainingState:
        family.add_metric([state], float(state is judged.state))
    yield family
    family = GaugeMetricFamily("podwatch_sensor_up", "1 while the sensor can read its source", labels=["sensor"])
    for name, sensor in sorted(view.sensors.items()):
        if sensor.state is not SensorState.ABSENT:
            family.add_metric([name], float(sensor.state is SensorState.OK))
    yield family
    family = GaugeMetricFamily("podwatch_findings", "Open findings", labels=["kind", "severity"])
    counts: dict[tuple[str, str], int] = {}
    for finding in view.findings:
        key = (str(finding.kind), str(finding.severity))
        counts[key] = counts.get(key, 0) + 1
    for (kind, severity), count in sorted(counts.items()):
        family.add_metric([kind, severity], float(count))
    yield family
    yield from _gauge(
        "podwatch_paused",
        "1 while podwatch is paused and neither stops nor starts training",
        float(view.facts.run.pause is not None),
    )
    yield from _gauge("podwatch_start_timestamp_seconds", "When this podwatch started", view.started_wall or None)
    yield from _gauge(
        "podwatch_last_turn_timestamp_seconds", "When the sensing loop last ran", view.facts.pod.wall or None
    )


def _progress(view: DaemonView) -> Iterable[Metric]:
    newest = view.facts.pod.newest_step
    if newest is not None:
        yield from _gauge("podwatch_step", "Newest training step seen", newest.step)
        yield from _gauge(
            "podwatch_step_timestamp_seconds", "When the newest training step was seen", view.wall_of(newest.at)
        )
    yield from _gauge(
        "podwatch_step_duration_seconds", "Learned median duration of a step", view.learned.median_step_seconds
    )
    yield from _gauge("podwatch_steps_at_risk", "Steps lost if training died now", view.steps_at_risk)
    if view.facts.pod.trainer.value is not None:
        trainer = view.facts.pod.trainer.value
        yield from _gauge("podwatch_trainer_processes", "Living processes of the trainer", len(trainer.descendants))


def _gpus(view: DaemonView) -> Iterable[Metric]:
    labels = ["gpu", "uuid"]
    used = GaugeMetricFamily("podwatch_gpu_memory_used_bytes", "Device memory in use", labels=labels)
    total = GaugeMetricFamily("podwatch_gpu_memory_total_bytes", "Device memory", labels=labels)
    base = GaugeMetricFamily("podwatch_gpu_memory_baseline_bytes", "Learned while healthy", labels=labels)
    busy = GaugeMetricFamily("podwatch_gpu_utilization_ratio", "Share of time busy, 0 to 1", labels=labels)
    heat = GaugeMetricFamily("podwatch_gpu_temperature_celsius", "Core temperature", labels=labels)
    up = GaugeMetricFamily("podwatch_gpu_up", "1 while the device answers", labels=labels)
    ecc = GaugeMetricFamily("podwatch_gpu_ecc_uncorrected", "Uncorrected ECC errors since driver load", labels=labels)
    held = GaugeMetricFamily("podwatch_gpu_throttled", "1 while heat or power throttles the clocks", labels=labels)
    for gpu in view.facts.pod.gpus.value or ():
        who = [str(gpu.index), gpu.uuid]
        up.add_metric(who, float(gpu.state == "ok"))
        if gpu.state == "ok":
            held.add_metric(who, float(bool(gpu.throttled)))
        busy_ratio = None if gpu.utilization_percent is None else gpu.utilization_percent / 100
        for family, value in (
            (used, gpu.memory_used_bytes),
            (total, gpu.memory_total_bytes),
            (base, view.learned.baseline(gpu.index)),
            (busy, busy_ratio),
            (heat, gpu.temperature_celsius),
            (ecc, gpu.ecc_uncorrected),
        ):
            if value is not None:
                family.add_metric(who, float(value))
    return (used, total, base, busy, heat, up, ecc, held)


def _inference(view: DaemonView) -> Iterable[Metric]:
    up = GaugeMetricFamily(
        "podwatch_inference_up", "1 while the health endpoint of the server answers ok", labels=["url"]
    )
    for server in view.facts.pod.inference.value or ():
        up.add_metric([scrub(server.url)], float(server.health is Health.OK))
    yield up


def _disk(view: DaemonView) -> Iterable[Metric]:
    disk = view.facts.pod.disk.value
    if disk is not None:
        yield from _gauge("podwatch_disk_capacity_bytes", "Capacity of the output disk", disk.capacity_bytes)
        yield from _gauge("podwatch_disk_free_bytes", "Free on the output disk", disk.free_bytes)
        yield from _gauge("podwatch_disk_used_ratio", "Used share of the output disk, 0 to 1", disk.used_ratio)
        yield from _gauge("podwatch_disk_inodes_free", "Free inodes on the output disk", disk.inodes_free)
    yield from _gauge("podwatch_disk_next_save_bytes", "Predicted size of the next save", view.next_save_bytes)
    capacity = GaugeMetricFamily(
        "podwatch_other_disk_capacity_bytes", "Capacity, by what is stored there", labels=["role"]
    )
    free = GaugeMetricFamily("podwatch_other_disk_free_bytes", "Free space, by what is stored there", labels=["role"])
    inodes = GaugeMetricFamily(
        "podwatch_other_disk_inodes_free", "Free inodes, by what is stored there", labels=["role"]
    )
    for other in view.facts.pod.disks.value or ():
        capacity.add_metric([other.role], float(other.capacity_bytes))
        free.add_metric([other.role], float(other.free_bytes))
        inodes.add_metric([other.role], float(other.inodes_free))
    yield from (capacity, free, inodes)


def _host(view: DaemonView) -> Iterable[Metric]:
    host = view.facts.pod.host.value
    if host is None:
        return
    nearest = host.files[0].open_files / host.files[0].limit if host.files else None
    for name, text, value in (
        ("podwatch_host_memory_available_bytes", "Available memory of the machine", host.memory_available_bytes),
        ("podwatch_host_memory_total_bytes", "Memory of the machine", host.memory_total_bytes),
        ("podwatch_host_swap_used_bytes", "Swap in use", host.swap_used_bytes),
        ("podwatch_shm_used_bytes", "Used of /dev/shm", host.shm_used_bytes),
        ("podwatch_shm_total_bytes", "Size of /dev/shm", host.shm_total_bytes),
        (
            "podwatch_container_memory_used_bytes",
            "Memory used in the cgroup of training, without page cache",
            host.cgroup_used_bytes,
        ),
        ("podwatch_container_memory_limit_bytes", "Memory limit of the cgroup of training", host.cgroup_limit_bytes),
        ("podwatch_container_oom_kills", "OOM kills in the cgroup of training since it was created", host.oom_kills),
        ("podwatch_open_files_ratio", "Open files of the process nearest to its limit, 0 to 1", nearest),
        ("podwatch_xids_watched", "1 while XID errors can be read", float(host.xids_watched)),
    ):
        yield from _gauge(name, text, value)


def _figures(view: DaemonView) -> Iterable[Metric]:
    newest: dict[str, float] = {}
    for metrics in view.facts.pod.training.value or ():
        newest.update(metrics.values)
    if newest:
        family = GaugeMetricFamily("podwatch_training_figure", "The trainer's own figures", labels=["figure"])
        for name, value in sorted(newest.items()):
            family.add_metric([name], value)
        yield family
    matches = view.facts.pod.logs.value
    if matches:
        family = GaugeMetricFamily(
            "podwatch_log_rule_hits", "Matches of the rule within its time window", labels=["rule"]
        )
        for match in matches:
            family.add_metric([match.rule], float(match.count))
        yield family


def _backups(view: DaemonView) -> Iterable[Metric]:
    sync = view.sync
    complete = [s for s in view.facts.checkpoints if s.complete]
    yield from _gauge("podwatch_checkpoints", "Checkpoints on this pod", len(view.facts.checkpoints))
    yield from _gauge(
        "podwatch_checkpoint_step", "Newest complete step here", max((s.step for s in complete), default=None)
    )
    yield from _gauge(
        "podwatch_checkpoint_timestamp_seconds",
        "When the newest complete checkpoint was written",
        max((s.changed_wall for s in complete), default=None),
    )
    yield from _gauge("podwatch_backup_configured", "1 when a store is configured", float(bool(sync.store_url)))
    yield from _gauge("podwatch_store_up", "1 while the store answers", None if sync.ok is None else float(sync.ok))
    yield from _gauge("podwatch_published_step", "Newest step in the store", sync.last_step)
    yield from _gauge(
        "podwatch_last_published_timestamp_seconds", "When a checkpoint was last published", sync.last_published_wall
    )
    yield from _gauge("podwatch_upload_bytes", "Size of the upload in progress", sync.total_bytes or None)
    yield from _gauge(
        "podwatch_upload_done_bytes",
        "Bytes already sent of the upload in progress",
        sync.uploaded_bytes if sync.total_bytes else None,
    )
    yield from _gauge(
        "podwatch_upload_bytes_per_second", "Rate of the upload in progress over the last seconds", sync.upload_rate
    )
    yield from _gauge(
        "podwatch_upload_left_seconds", "Remaining time of the upload in progress", sync.upload_left_seconds
    )


def _nodes(view: DaemonView) -> Iterable[Metric]:
    """Rank 0 has a row for each node as it has heard of it, the others for themselves: as many rows as nodes, and not
    their square. A node that has not reported has no row at rank 0."""
    yield from _gauge("podwatch_nodes", "Nodes of the run", view.node_count)
    leads = any(node.here and node.rank == 0 for node in view.nodes)
    nodes = [node for node in view.nodes if leads or node.here]
    if not nodes:
        return
    labels = ["node", "host"]
    age = GaugeMetricFamily("podwatch_node_report_age_seconds", "Time since the node's last report", labels=labels)
    step = GaugeMetricFamily("podwatch_node_step", "Newest training step seen on the node", labels=labels)
    reason = GaugeMetricFamily(
        "podwatch_node_is_reason", "1 for the node that is the reason for the end of this attempt", labels=labels
    )
    phase = GaugeMetricFamily("podwatch_node_phase", "1 for the node's current phase", labels=[*labels, "phase"])
    for node in nodes:
        who = [str(node.rank), scrub(node.host)]
        age.add_metric(who, node.silent_seconds)
        reason.add_metric(who, float(node.reason))
        phase.add_metric([*who, node.phase], 1.0)
        if node.step is not None:
            step.add_metric(who, float(node.step))
    yield from (age, step, reason, phase)


def _counters(view: DaemonView) -> Iterable[Metric]:
    c = view.counters
    for name, text, value in (
        ("podwatch_turns", "Iterations of the sensing loop since podwatch started", c.turns),
        ("podwatch_restarts", "Restarts of the trainer by podwatch", c.restarts),
        ("podwatch_published_sets", "Checkpoints published", c.published),
        ("podwatch_skipped_sets", "Checkpoints not uploaded, because a newer one was uploaded instead", c.skipped),
        ("podwatch_abandoned_sets", "Uploads of checkpoints that were abandoned", c.abandoned),
        ("podwatch_uploaded_bytes", "Bytes of published checkpoints", c.uploaded_bytes),
        ("podwatch_pruned_sets", "Checkpoints deleted from the pod", c.pruned),
    ):
        yield CounterMetricFamily(name, text, value=float(value))
    calls = CounterMetricFamily("podwatch_store_calls", "Calls to the store by class (A is free)", labels=["class"])
    for kind, count in sorted(view.sync.calls.items()):
        calls.add_metric([kind], float(count))
    yield calls
    incidents = CounterMetricFamily("podwatch_incidents", "Failures of the run", labels=["kind"])
    for kind, count in sorted(c.incidents.items()):
        incidents.add_metric([kind], float(count))
    yield incidents
    events = CounterMetricFamily("podwatch_events", "Events recorded", labels=["name"])
    for name, count in sorted(c.events.items()):
        events.add_metric([name], float(count))
    yield events


def _account(account: Account | None) -> Iterable[Metric]:
    if account is None:
        return
    yield from _gauge("podwatch_goodput_ratio", "Share of the time that no failure took, 0 to 1", account.goodput)
    lost = GaugeMetricFamily("podwatch_lost_training_seconds", "Training that was lost", labels=["cause"])
    steps = GaugeMetricFamily("podwatch_lost_steps", "Steps that resumes went back", labels=["cause"])
    for cause, loss in sorted(account.causes.items()):
        if loss.training is not None:
            lost.add_metric([cause], loss.training)
        if loss.steps is not None:
            steps.add_metric([cause], float(loss.steps))
    yield from (lost, steps)
    if account.finish is not None:
        finish = GaugeMetricFamily("podwatch_finish_seconds", "Time to the target step", labels=["estimate"])
        for name in ("low", "high"):
            finish.add_metric([name], getattr(account.finish, name))
        yield finish
    money = GaugeMetricFamily("podwatch_money", "Cost of the run by [cost] per_hour", labels=["kind", "currency"])
    for kind, amount in (("so_far", account.run.so_far), ("lost", account.run.lost), ("at_end", account.at_end)):
        if amount is not None:
            money.add_metric([kind, account.price.currency], amount)
    yield money
