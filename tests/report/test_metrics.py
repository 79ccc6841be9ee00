"""The exposition: parsed by the reference parser, linted by promtool where it is installed."""

import math
import shutil
import subprocess
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from podwatch.domain.snapshot import GpuState
from podwatch.report.metrics import exposition, make_registry
from podwatch.report.status import build_status
from tests.report import views


def samples(view):
    text = exposition(make_registry(lambda: view)).decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def value(view, name, **labels):
    return samples(view).get((name, tuple(sorted(labels.items()))))


def test_values():
    view = views.healthy()
    assert value(view, "podwatch_build_info", version="0.1.0") == 1
    assert value(view, "podwatch_step") == 85
    assert value(view, "podwatch_step_timestamp_seconds") == pytest.approx(views.WALL - 18)
    assert value(view, "podwatch_last_published_timestamp_seconds") == views.WALL - 840
    assert value(view, "podwatch_gpu_memory_used_bytes", gpu="0", uuid="GPU-00000000") == 71 * views.GIB
    assert value(view, "podwatch_gpu_utilization_ratio", gpu="1", uuid="GPU-00000001") == pytest.approx(0.97)
    assert value(view, "podwatch_disk_free_bytes") == 110 * views.GB
    assert value(view, "podwatch_restarts_total") == 1
    assert value(view, "podwatch_incidents_total", kind="silent-death") == 1
    assert value(view, "podwatch_sensor_up", sensor="gpu") == 1
    assert value(view, "podwatch_backup_configured") == 1


@pytest.mark.parametrize("name", views.ALL)
def test_exactly_one_state_holds(name):
    view = views.ALL[name]()
    found = samples(view)
    for metric in ("podwatch_training_state", "podwatch_overall"):
        assert sum(v for (n, _), v in found.items() if n == metric) == 1
    state = build_status(view)["training"]["state"]
    assert found[("podwatch_training_state", (("state", state),))] == 1


def test_a_blind_sensor_is_down_and_its_values_are_gone():
    view = views.blind()
    assert value(view, "podwatch_sensor_up", sensor="gpu") == 0
    assert not [n for n, _ in samples(view) if n.startswith("podwatch_gpu_")]


def test_a_lost_gpu_is_down_without_values():
    view = views.healthy()
    lost = replace(views.gpu(0, 0, state=GpuState.LOST), memory_used_bytes=None, utilization_percent=None)
    reading = replace(view.facts.pod.gpus, value=(lost,))
    view = views.changed(view, snapshot=replace(view.facts.pod, gpus=reading))
    assert value(view, "podwatch_gpu_up", gpu="0", uuid="GPU-00000000") == 0
    assert value(view, "podwatch_gpu_memory_used_bytes", gpu="0", uuid="GPU-00000000") is None


def test_the_nodes_of_a_run_and_the_one_that_ended_it():
    view, ended = views.gang(), views.gang(ended=True)
    first, second = {"node": "0", "host": "gpu-0.cluster"}, {"node": "1", "host": "gpu-1.cluster"}
    assert value(view, "podwatch_nodes") == 3
    assert value(view, "podwatch_node_report_age_seconds", **second) == 34
    assert value(view, "podwatch_node_step", **first) == 85
    assert value(view, "podwatch_node_report_age_seconds", node="2", host="gpu-2.cluster") is None
    assert value(ended, "podwatch_node_step", node="2", host="gpu-2.cluster") is None
    follower = replace(ended, nodes=tuple(replace(node, here=node.rank == 1) for node in ended.nodes))
    rows = [dict(labels)["node"] for name, labels in samples(follower) if name.startswith("podwatch_node_")]
    assert set(rows) == {"1"}, "its own row alone"
    assert value(follower, "podwatch_nodes") == 3
    assert value(views.healthy(), "podwatch_nodes") == 1
    assert not [n for n, _ in samples(views.healthy()) if n.startswith("podwatch_node_")]


@pytest.mark.parametrize("name", views.ALL)
def test_names_and_labels_follow_the_conventions(name):
    for (metric, labels), number in samples(views.ALL[name]()).items():
        assert metric.startswith("podwatch_")
        assert not math.isnan(number)
        assert not {"step", "save_id"} & {k for k, _ in labels}


@pytest.mark.parametrize("name", views.ALL)
def test_promtool_has_nothing_to_say(name):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    text = exposition(make_registry(views.ALL[name]))
    result = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=30)
    assert (result.returncode, result.stdout + result.stderr) == (0, b"")
