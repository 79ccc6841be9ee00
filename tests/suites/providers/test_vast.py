"""Vast.ai through the vendor's own client, against a server with the faults that its API is known for."""

from pathlib import Path

import pytest

from tests.suites.providers.conftest import LABEL, PROGRAMS, Command
from tests.support.clouds import Fault, VastCloud

CREATE, LIST, DESTROY = "PUT /api/v0/asks/[0-9]+/", "GET /api/v1/instances/", "DELETE /api/v0/instances/[0-9]+/"
SEARCH, USER = "POST /api/v0/bundles/", "GET /api/v0/users/current"


def test_life_of_an_instance(vast: Command, vast_cloud: VastCloud) -> None:
    vast_cloud.offer(11, 0.9)
    vast_cloud.offer(12, 0.7)
    vast_cloud.offer(13, 0.3, gpu_name="RTX 3060")
    vast_cloud.offer(14, 0.4, verified=False)
    assert vast.list() == (0, {"version": 1, "account": "vast:4242", "complete": True, "instances": []})
    code, made = vast.create(PODWATCH_GENERATION="7")
    assert (code, made) == (0, {"version": 1, "id": "7000001", "label": LABEL, "price_per_hour": 0.7})
    (body,) = [body for call, body in vast_cloud.calls if call == "PUT /api/v0/asks/12/"]
    assert body["env"] == {
        "POD_RUN": "run1", "PODWATCH_GENERATION": "7", "WANDB_API_KEY": "wandb key", "B2_APPLICATION_KEY": "pod-key",
    }  # fmt: skip
    assert (body["label"], body["image"], body["disk"], body["price"]) == (LABEL, "img", 100, None)
    assert body["onstart"] == "#!/bin/sh\nset -e\nexec podwatch run\n"
    vast_cloud.instances["7000001"] |= {"actual_status": "running", "status_msg": "success"}
    assert vast.list()[1]["instances"] == [{
        "id": "7000001", "label": LABEL, "state": "running", "price_per_hour": 0.7,
        "created_at": "2026-09-21T14:13:20+00:00", "detail": "running (intended running, current running) success",
    }]  # fmt: skip
    assert vast.destroy("7000001", "podwatch:run1:8") == (65, "")
    assert vast.destroy("7000001") == (0, {"version": 1, "id": "7000001", "destroyed": True})
    assert vast_cloud.instances == {}
    assert vast.destroy("7000001")[0] == 0


def test_life_of_one_from_the_example_configuration(vast: Command, vast_cloud: VastCloud) -> None:
    vast_cloud.offer(15, 0.9, inet_down=900, inet_up=900, disk_space=400)
    vast.environment |= {"VAST_CONFIG": str(PROGRAMS / "vast.toml"), "POD_B2_KEY_ID": "id"}
    assert vast.create()[0] == 0, vast.errors
    (body,) = [body for call, body in vast_cloud.calls if call == "PUT /api/v0/asks/15/"]
    assert body["onstart"].startswith("#!/bin/sh\n# Vast.ai")
    assert (body["runtype"], body["env"]["POD_TRUST"]) == ("ssh_direc ssh_proxy", "--trust")


def test_pages_and_states(vast: Command, vast_cloud: VastCloud) -> None:
    """Sixty instances of others around those of the run, three pages; a status that nobody has seen yet is no error."""
    want = {None: "unknown", "loading": "pending", "created": "pending", "rebooting": "pending", "running": "running",
            "stopped": "stopped", "frozen": "stopped", "exited": "stopped", "unknown": "unknown",
            "offline": "unknown", "teleporting": "unknown"}  # fmt: skip
    ids = {}
    for status, state in want.items():
        for label in (None, "podwatch:run1-v2:7", "podwatch:run1:07", "podwatch:run", "podwatch:run1:7:1"):
            vast_cloud.rent(label, status)
        ids[vast_cloud.rent(LABEL, status)] = state
    assert {instance["id"]: instance["state"] for instance in vast.list()[1]["instances"]} == ids
    assert vast_cloud.count(LIST) == 3


def test_a_lowest_bid(vast: Command, vast_cloud: VastCloud) -> None:
    """The bid is above the lowest, the disk is in the price, and no bid goes above the controller's limit."""
    vast.config.write_text("interruptible = true\n" + vast.config.read_text())
    disk = 0.15 * 100 / 730
    vast_cloud.offer(21, 0.8)
    code, made = vast.create(0.48)
    assert code == 0
    assert made["price_per_hour"] == pytest.approx(0.48)
    (instance,) = vast_cloud.instances.values()
    assert instance["dph_total"] == pytest.approx(0.48 - disk, abs=1e-4)
    vast_cloud.instances.clear()
    vast_cloud.offer(22, 0.94)  # the lowest bid is 0.47: with the disk it is too much
    assert vast.create(0.48) == (3, "")
    assert vast_cloud.instances == {}


def test_a_refused_request_that_made_an_instance(vast: Command, vast_cloud: VastCloud) -> None:
    """The reply is an error and has a new_contract: that instance is billed. It goes, and the next offer is taken."""
    vast_cloud.offer(31, 0.5)
    vast_cloud.offer(32, 0.6)
    left = int(vast_cloud.rent(LABEL, "stopped"))
    stored = vast_cloud.instances.pop(str(left))
    vast_cloud.faults.append(
        Fault("PUT /api/v0/asks/31/", 200, {"success": False, "error": "bid_too_low", "new_contract": left})
    )
    vast_cloud.at_call["PUT /api/v0/asks/31/"] = lambda: vast_cloud.instances.setdefault(str(left), stored)
    code, made = vast.create()
    assert (code, made["price_per_hour"]) == (0, 0.6)
    assert [row["id"] for row in vast_cloud.instances.values()] == [int(made["id"])]
    assert f"instance {left} exists and is billed" in vast.errors


def test_one_that_cannot_be_destroyed_is_reported(vast: Command, vast_cloud: VastCloud) -> None:
    vast_cloud.offer(31, 0.5)
    left = vast_cloud.rent(LABEL, "stopped")
    stored = vast_cloud.instances.pop(left)
    vast_cloud.at_call["PUT /api/v0/asks/31/"] = lambda: vast_cloud.instances.setdefault(left, stored)
    vast_cloud.faults += [
        Fault("PUT /api/v0/asks/31/", 200, {"success": False, "error": "bid_too_low", "new_contract": int(left)}),
        Fault(DESTROY, 500, "oops", times=99),
    ]
    vast.seconds = "25"
    assert vast.create() == (75, "")
    assert f"{left} exists" in vast.errors
    assert [instance["id"] for instance in vast.list()[1]["instances"]] == [left]


def test_a_refusal_whose_text_the_client_keeps_back(vast: Command, vast_cloud: VastCloud) -> None:
    """With a status of 4xx, vastai drops the answer's body and the number of the instance with it: the list has it."""
    vast_cloud.offer(41, 0.5)
    vast_cloud.offer(42, 0.6)
    vast_cloud.faults.append(Fault("PUT /api/v0/asks/41/", 400, {"success": False, "msg": "?"}, effect=True))
    assert vast.create() == (75, "")
    (made,) = vast_cloud.instances
    assert vast.list()[1]["instances"][0]["id"] == made


@pytest.mark.parametrize(
    "fault",
    [Fault(CREATE, 502, "bad gateway", effect=True, times=9), Fault(CREATE, drop=True, effect=True, times=9),
     Fault(CREATE, cut="text", times=9), Fault(CREATE, cut="body", times=9), Fault(CREATE, 200, {}, effect=True),
     Fault(CREATE, hang=True, effect=True)],
    ids=str,
)  # fmt: skip
def test_an_unknown_outcome_makes_one_instance(vast: Command, vast_cloud: VastCloud, fault: Fault) -> None:
    """vastai is kept from repeating a create: with two offers, a second request would rent a second machine."""
    vast_cloud.offer(51, 0.5)
    vast_cloud.offer(52, 0.6)
    vast_cloud.faults.append(fault)
    vast.seconds = "15" if fault.hang else vast.seconds
    assert vast.create() == (75, "")
    assert vast_cloud.count(CREATE) == 1
    (made,) = vast_cloud.instances
    code, again = vast.create()
    assert (code, again["id"], len(vast_cloud.instances)) == (0, made, 1)


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (Fault(CREATE, 429, "API requests too frequent", {"Retry-After": "1"}), 0, "limits the rate"),
        (Fault(CREATE, 410, {"success": False, "error": "no_such_ask", "msg": "gone"}), 0, "offer 61 is refused"),
        (Fault(CREATE, 404, {"success": False, "error": "no_such_ask", "msg": "no ask"}, times=9), 3, "is refused"),
        (Fault(CREATE, 400, {"success": False, "error": "invalid_args", "msg": "bad image"}, times=9), 65, "bad image"),
        (Fault(CREATE, 401, {"success": False, "msg": "Invalid user key"}), 65, "Invalid user key"),
        (Fault(SEARCH, 429, {"error": "search_quota_exceeded", "msg": "quota"}, times=9), 69, "quota"),
        (Fault(SEARCH, 200, {"offers": {}}), 69, "no list of offers"),
        (Fault(SEARCH, 200, "[]", times=9), 69, "search offers"),
        (Fault(LIST, 500, "oops", times=99), 69, "show instances"),
    ],
    ids=str,
)
def test_create_with_faults(vast: Command, vast_cloud: VastCloud, fault: Fault, code: int, message: str) -> None:
    vast_cloud.offer(61, 0.5)
    vast_cloud.offer(62, 0.6)
    vast_cloud.faults.append(fault)
    assert vast.create()[0] == code, vast.errors
    assert message in vast.errors
    assert len(vast_cloud.instances) == (code == 0)


def test_no_offer_within_the_price(vast: Command, vast_cloud: VastCloud) -> None:
    vast_cloud.offer(71, 1.01)
    vast_cloud.offer(72, 0.5, rentable=False)
    assert vast.create(1.0) == (3, "")
    assert vast_cloud.count(CREATE) == 0


def test_an_endpoint_that_was_removed(vast: Command, vast_cloud: VastCloud) -> None:
    """vastai ends with 0 and prints nothing; of an empty object its own list of all pages makes [] (1.9.1)."""
    vast_cloud.rent(LABEL)
    vast_cloud.faults.append(Fault(LIST, 404, "404: Not Found", times=99))
    assert vast.list() == (69, "")
    vast_cloud.faults[:] = [Fault(LIST, 200, {}, times=99)]
    assert vast.list() == (69, "")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(LIST, 200, {"instances": None, "total_instances": 0}),
        Fault(LIST, 200, {"success": True, "instances": []}),
        Fault(LIST, 200, {"instances": [], "total_instances": 1}),
        Fault(LIST, 200, {"instances": [{"label": LABEL}], "total_instances": 1}),
        Fault(LIST, 200, {"instances": [], "total_instances": 60, "next_token": "25"}),
        Fault(LIST, 401, {"msg": "Invalid user key"}),
        Fault(LIST, 200, ""),
        Fault(LIST, cut="text"),
        Fault(LIST, cut="body"),
        Fault(USER, 200, {"email": "me@example.org"}),
    ],
    ids=str,
)
def test_a_list_that_cannot_be_read_is_an_error(vast: Command, vast_cloud: VastCloud, fault: Fault) -> None:
    vast_cloud.rent(LABEL)
    fault.times = 99
    vast_cloud.faults.append(fault)
    assert vast.list() == (69, ""), vast.errors


def test_faults_that_pass(vast: Command, vast_cloud: VastCloud) -> None:
    vast_cloud.rent(LABEL)
    vast_cloud.faults += [Fault(LIST, 429, "API requests too frequent", {"Retry-After": "1"}), Fault(LIST, 502, "busy")]
    assert len(vast.list()[1]["instances"]) == 1


def test_an_instance_that_changes_between_the_pages(vast: Command, vast_cloud: VastCloud) -> None:
    """The total of the second page differs from what was read: the list is read again."""
    ids = [vast_cloud.rent(LABEL) for _ in range(30)]
    seen = iter(range(99))
    vast_cloud.at_call[LIST] = lambda: vast_cloud.instances.pop(ids[0]) if next(seen) == 1 else None
    assert [instance["id"] for instance in vast.list()[1]["instances"]] == ids[1:]
    assert vast_cloud.count(LIST) == 4


def test_no_answer_at_all(vast: Command) -> None:
    vast.environment["VAST_URL"] = "http://127.0.0.1:1"
    assert vast.list() == (69, "")


@pytest.mark.parametrize(
    ("fault", "code"),
    [(Fault(DESTROY, 500, "oops", effect=True), 0), (Fault(DESTROY, 200, {"success": False, "msg": "no"}), 75),
     (Fault(DESTROY, 404, "404: Not Found"), 75), (Fault(DESTROY, 429, "slow", {"Retry-After": "1"}), 0)],
    ids=str,
)  # fmt: skip
def test_destroy_believes_the_list_only(vast: Command, vast_cloud: VastCloud, fault: Fault, code: int) -> None:
    made = vast_cloud.rent(LABEL)
    vast_cloud.faults.append(fault)
    vast.seconds = "15" if code else vast.seconds
    assert vast.destroy(made)[0] == code, vast.errors
    assert (made in vast_cloud.instances) == (code != 0)


def test_no_secret_is_in_the_list_of_processes(vast: Command, vast_cloud: VastCloud, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    vast_cloud.offer(81, 0.5)
    vast_cloud.at_call["PUT /api/v0/asks/81/"] = lambda: seen.write_bytes(
        b"\n".join(p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if _readable(p))
    )
    assert vast.create()[0] == 0
    assert b"runpy" in seen.read_bytes()
    assert b"pod-key" not in seen.read_bytes()
    assert b"account-key" not in seen.read_bytes()


def _readable(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def test_configuration(vast: Command, vast_cloud: VastCloud) -> None:
    vast_cloud.offer(91, 0.5)
    good = vast.config.read_text()
    for bad in (good.replace("100", "4"), good.replace('"img"', '""'), "color = 1\n" + good, "offers = 'x'\n" + good):
        vast.config.write_text(bad)
        assert vast.create() == (65, ""), bad
    vast.config.write_text(good)
    vast.environment["WANDB_API_KEY"] = 'with "quotes"'
    assert vast.create() == (65, "")
    vast.environment["PATH"] = "/usr/bin:/bin"
    assert vast.list() == (65, "")
    assert "pip install vastai" in vast.errors
    assert vast_cloud.count(CREATE) == 0
