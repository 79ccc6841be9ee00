"""RunPod v2: every answer that a controller must not misread."""

import json
from typing import Any

import pytest

from podwatch.controller.machines import parse_listing
from tests.suites.providers.conftest import LABEL, PROGRAMS, Command
from tests.support.clouds import Fault, RunPodCloud

GPU, OTHER = "NVIDIA GeForce RTX 4090", "NVIDIA L40S"
CREATE, LIST = "POST /v2/pods", "GET /v2/pods"


def test_life_of_a_pod(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.stock(GPU, 0.4)
    assert runpod.list() == (0, {"version": 1, "account": "runpod:user_2abc", "complete": True, "instances": []})
    code, made = runpod.create(PODWATCH_GENERATION="7")
    assert (code, made) == (0, {"version": 1, "id": "pod00001", "label": LABEL, "price_per_hour": 0.8})
    assert runpod_cloud.instances["pod00001"]["env"] == {
        "POD_RUN": "run1", "PODWATCH_GENERATION": "7", "WANDB_API_KEY": "wandb key", "B2_APPLICATION_KEY": "pod-key",
    }  # fmt: skip
    assert runpod.list()[1]["instances"] == [{
        "id": "pod00001", "label": LABEL, "state": "pending", "price_per_hour": 0.8,
        "created_at": "2026-11-23T10:00:00Z", "detail": "PROVISIONING, actions ['stop', 'restart', 'terminate']",
    }]  # fmt: skip
    assert runpod.destroy("pod00001") == (0, {"version": 1, "id": "pod00001", "destroyed": True})
    assert runpod_cloud.instances == {}
    assert runpod.destroy("pod00001") == (0, {"version": 1, "id": "pod00001", "destroyed": True})


def test_the_example_configuration(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.stock(OTHER, 0.4)
    runpod.environment |= {"RUNPOD_CONFIG": str(PROGRAMS / "runpod.toml"), "POD_B2_KEY_ID": "id"}
    assert runpod.create()[0] == 0, runpod.errors
    (pod,) = runpod_cloud.instances.values()
    assert pod["env"]["B2_APPLICATION_KEY_ID"] == "id"


def test_only_exact_labels_belong_to_the_run(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    own = runpod_cloud.rent(LABEL)
    foreign = ("podwatch:run1-v2:7", "podwatch:run:7", "podwatch:run1:7:8", "podwatch:run1:07", "podwatch:run1:")
    foreign = (*foreign, "podwatch:run1:7:abcd2345", "podwatch:run1:sabcd234:7")
    for name in (*foreign, "xpodwatch:run1:7", "podwatch:run1:7 ", "podwatch:run1:0", "podwatch:RUN1:7", "my pod"):
        runpod_cloud.rent(name)
    tagged = runpod_cloud.rent(f"{LABEL}:sabcd234")
    assert [instance["id"] for instance in runpod.list()[1]["instances"]] == [own, tagged]
    assert [instance["label"] for instance in runpod.list("run1-v2")[1]["instances"]] == ["podwatch:run1-v2:7"]


def test_states(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    want = {"PROVISIONING": "pending", "STARTING": "pending", "RUNNING": "running", "EXITED": "stopped",
            "ERROR": "unknown", "TERMINATED": "ended", "HIBERNATED": "unknown", None: "unknown"}  # fmt: skip
    ids = {runpod_cloud.rent(LABEL, status): state for status, state in want.items()}  # type: ignore[arg-type]
    found = {instance["id"]: instance["state"] for instance in runpod.list()[1]["instances"]}
    assert found == ids


def test_a_time_of_another_form_does_not_spoil_the_list(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    """The controller refuses the list of a program that gives it one, and could then destroy nothing."""
    shown = {
        "2026-11-23 10:00:00.52 +0000 UTC": "2026-11-23 10:00:00.52+0000",
        "2026-11-23T10:00:00": None,
        "soon": None,
    }
    for text in shown:
        runpod_cloud.instances[runpod_cloud.rent(LABEL)]["createdAt"] = text
    found = runpod.list()[1]
    assert [instance["created_at"] for instance in found["instances"]] == list(shown.values())
    assert len(parse_listing(json.dumps(found).encode()).instances) == len(shown)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(LIST, 500, "oops", times=9), Fault(LIST, 404, {"detail": "no such endpoint"}), Fault(LIST, 200, ""),
        Fault(LIST, 200, {}), Fault(LIST, 200, []), Fault(LIST, 200, {"pods": None}), Fault(LIST, 200, {"pods": {}}),
        Fault(LIST, 200, {"pods": [7]}), Fault(LIST, 200, {"pods": [{"name": LABEL}]}), Fault(LIST, 200, "<html>"),
        Fault(LIST, 200, {"pods": [], "nextCursor": "abc"}), Fault(LIST, 401, {"detail": "key"}),
        Fault(LIST, 204, ""), Fault(LIST, 302, "", {"Location": "http://127.0.0.1:1/"}),
        Fault(LIST, cut="text", times=9), Fault(LIST, cut="body", times=9), Fault(LIST, drop=True, times=9),
        Fault("GET /v2/account", 404, {}), Fault("GET /v2/account", 200, {"id": ""}),
        Fault("GET /v2/account", 200, {"id": None}),
    ],
    ids=str,
)  # fmt: skip
def test_a_list_that_cannot_be_read_is_an_error(runpod: Command, runpod_cloud: RunPodCloud, fault: Fault) -> None:
    runpod_cloud.rent(LABEL)
    fault.times = max(fault.times, 3)
    runpod_cloud.faults.append(fault)
    assert runpod.list() == (69, "")
    runpod_cloud.faults.clear()
    assert len(runpod.list()[1]["instances"]) == 1


def test_a_pod_without_a_price_is_an_error(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.rent(LABEL, cost=None)
    assert runpod.list() == (69, "")
    assert "no readable price" in runpod.errors


def test_faults_that_pass(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    """A short outage, and the rate limit with and without Retry-After."""
    runpod_cloud.rent(LABEL)
    runpod_cloud.faults += [Fault(LIST, 429, "slow down", {"Retry-After": "1"}), Fault(LIST, 503, "busy"),
                            Fault("GET /v2/account", cut="body")]  # fmt: skip
    code, found = runpod.list()
    assert code == 0
    assert len(found["instances"]) == 1


def test_the_rate_limit_ends_the_attempt(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.stock(GPU, 0.4)
    runpod_cloud.faults.append(Fault(CREATE, 429, {"detail": "limit"}, {"Retry-After": "0"}, times=99))
    assert runpod.create() == (69, "")
    assert runpod_cloud.count(CREATE) == 4
    assert runpod_cloud.instances == {}


def test_no_offer_within_the_price(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    assert runpod.create()[0] == 3
    runpod_cloud.stock(GPU, 0.51)
    runpod_cloud.stock(OTHER, 0.1, "NONE")
    assert runpod.create() == (3, "")
    assert runpod_cloud.count(CREATE) == 0


def test_the_next_gpu_type_is_tried(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.stock(GPU, 0.3, "GONE")  # the catalog has it, the request does not get it
    runpod_cloud.stock(OTHER, 0.45)
    code, made = runpod.create()
    assert (code, made["price_per_hour"]) == (0, 0.9)
    runpod_cloud.instances.clear()
    runpod_cloud.types[OTHER]["availability"] = "GONE"
    assert runpod.create() == (3, "")  # 400 for each may be capacity: not refused for good


@pytest.mark.parametrize(("status", "code"), [(402, 65), (422, 65), (403, 65), (401, 75), (500, 75), (409, 75)])
def test_refusals(runpod: Command, runpod_cloud: RunPodCloud, status: int, code: int) -> None:
    runpod_cloud.stock(GPU, 0.4)
    runpod_cloud.faults.append(Fault(CREATE, status, {"detail": "no", "errors": ["$.x"]}, times=9))
    assert runpod.create() == (code, "")
    assert runpod_cloud.count(CREATE) == 1


@pytest.mark.parametrize(
    "fault",
    [Fault(CREATE, cut="text"), Fault(CREATE, cut="body"), Fault(CREATE, drop=True, effect=True),
     Fault(CREATE, 502, "bad gateway", effect=True), Fault(CREATE, 201, {"id": ""}, effect=True),
     Fault(CREATE, 201, {"id": "x", "name": "another"}, effect=True), Fault(CREATE, 200, "", effect=True),
     Fault(CREATE, hang=True, effect=True)],
    ids=str,
)  # fmt: skip
def test_an_unknown_outcome_makes_one_pod(runpod: Command, runpod_cloud: RunPodCloud, fault: Fault) -> None:
    """The caller lists again and finds the pod; a caller that only repeats gets it, too, and no second one."""
    runpod_cloud.stock(GPU, 0.4)
    runpod_cloud.faults.append(fault)
    runpod.seconds = "3" if fault.hang else runpod.seconds
    assert runpod.create() == (75, "")
    (made,) = runpod_cloud.instances
    assert [instance["id"] for instance in runpod.list()[1]["instances"]] == [made]
    code, again = runpod.create()
    assert (code, again["id"], len(runpod_cloud.instances)) == (0, made, 1)


def test_a_pod_above_the_limit_does_not_stay(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.stock(GPU, 0.4)
    runpod_cloud.types[GPU]["surcharge"] = 2.0
    assert runpod.create() == (3, "")
    assert runpod_cloud.instances == {}
    assert "costs $1.6 per hour" in runpod.errors


def test_no_answer_at_all(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod.environment["RUNPOD_API_URL"] = "http://127.0.0.1:1/v2"
    assert runpod.list()[0] == 69
    assert runpod.create()[0] == 69  # nothing was sent


def test_destroy_checks_the_label(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    other = runpod_cloud.rent("podwatch:run1:8")
    assert runpod.destroy(other) == (65, "")
    assert runpod.destroy(other, "my pod") == (65, "")
    assert other in runpod_cloud.instances


@pytest.mark.parametrize(
    ("fault", "code"),
    [(Fault("DELETE .*", 500, "oops", effect=True), 0), (Fault("DELETE .*", drop=True, effect=True), 0),
     (Fault("DELETE .*", 404, {"detail": "no such endpoint"}), 75), (Fault("DELETE .*", 403, {"detail": "no"}), 65),
     (Fault("DELETE .*", 429, "slow", {"Retry-After": "1"}), 0)],
    ids=str,
)  # fmt: skip
def test_destroy_believes_the_list_only(runpod: Command, runpod_cloud: RunPodCloud, fault: Fault, code: int) -> None:
    made = runpod_cloud.rent(LABEL)
    runpod_cloud.faults.append(fault)
    runpod.seconds = "5" if code == 75 else runpod.seconds
    assert runpod.destroy(made)[0] == code
    assert (made in runpod_cloud.instances) == (code != 0)


def test_a_list_that_fails_does_not_mean_gone(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    made = runpod_cloud.rent(LABEL)
    runpod_cloud.faults.append(Fault(LIST, 500, "oops", times=99))
    assert runpod.destroy(made) == (69, "")


@pytest.mark.parametrize(
    "request_",
    [[], {}, {"version": 1}, {"version": 2, "run_id": "run1"}, {"version": True, "run_id": "run1"},
     {"version": 1, "run_id": 7}, {"version": 1, "run_id": "run1", "more": 1}],
    ids=str,
)  # fmt: skip
def test_requests_of_another_form(runpod: Command, request_: Any) -> None:
    assert runpod.run("list", request_) == (65, "")


def test_configuration(runpod: Command, runpod_cloud: RunPodCloud) -> None:
    runpod_cloud.stock(GPU, 0.4)
    good = runpod.config.read_text()
    for bad in ("gpus = [", 'colour = "red"\n' + good, good.replace("2", '"two"', 1), "gpus = []\nimage = 'img'\n"):
        runpod.config.write_text(bad)
        assert runpod.create() == (65, ""), bad
    runpod.config.write_text(good)
    del runpod.environment["POD_B2_KEY"]
    assert runpod.create() == (65, "")
    assert "POD_B2_KEY is not set" in runpod.errors
    assert runpod.run("start", {})[0] == 64
