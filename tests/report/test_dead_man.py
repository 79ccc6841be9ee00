"""The dead-man's switch against a real web server: each service's form, what is withheld, and what a failure does."""

import asyncio
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podwatch.domain.finding import FindingKind
from podwatch.domain.secrets import register_address
from podwatch.report.dead_man import MOST_TEXT, DeadMan, Signal, call_of, signal_of
from tests.support.ping_service import Service

HEALTHCHECKS = "https://hc-ping.com/5c1b2e0a-1111-4222-8333-944455556666"
KUMA = "https://kuma.example/api/push/T0k3n?status=up&msg=OK&ping="
CRONITOR = "https://cronitor.link/p/K3y/night"
BETTER = "https://uptime.betterstack.com/api/v1/heartbeat/T0k3n"


def status(overall: str = "ok", summary: str = "", step: int | None = 7) -> dict[str, Any]:
    reasons = [{"summary": summary}] if summary else []
    return {"overall": overall, "run_id": "r", "training": {"state": "running", "step": step}, "reasons": reasons}


@pytest.mark.parametrize(
    ("url", "signal", "method", "called"),
    [
        (HEALTHCHECKS, Signal.START, "POST", f"{HEALTHCHECKS}/start"),
        (HEALTHCHECKS, Signal.SUCCESS, "POST", HEALTHCHECKS),
        (HEALTHCHECKS, Signal.FAIL, "POST", f"{HEALTHCHECKS}/fail"),
        (f"{HEALTHCHECKS}/", Signal.FAIL, "POST", f"{HEALTHCHECKS}/fail"),
        ("https://hc.example/ping/key/slug?create=1", Signal.FAIL, "POST", "https://hc.example/ping/key/slug/fail?create=1"),
        (BETTER, Signal.SUCCESS, "POST", BETTER),
        (BETTER, Signal.FAIL, "POST", f"{BETTER}/fail"),
    ],
)  # fmt: skip
def test_each_service_is_called_in_its_form(url: str, signal: Signal, method: str, called: str) -> None:
    call = call_of(url, signal, "r: running")
    assert call is not None
    assert (call.method, call.url, call.body) == (method, called, "r: running")


def test_services_that_read_the_query() -> None:
    up, down = call_of(KUMA, Signal.SUCCESS, "r: 5 % & more"), call_of(KUMA, Signal.FAIL, "r: dead")
    assert up is not None
    assert down is not None
    assert (up.method, up.body) == ("GET", "")
    assert parse_qs(urlsplit(up.url).query)["msg"] == ["r: 5 % & more"]
    assert parse_qs(urlsplit(down.url).query)["status"] == ["down"]
    states = []
    for signal in Signal:
        call = call_of(CRONITOR, signal, "text")
        assert call is not None
        states.append(parse_qs(urlsplit(call.url).query)["state"])
    assert states == [["run"], ["complete"], ["fail"]]


def test_a_service_without_a_start() -> None:
    assert call_of(KUMA, Signal.START, "") is None
    assert call_of(BETTER, Signal.START, "") is None


@given(st.text(max_size=2000), st.sampled_from(Signal), st.sampled_from([HEALTHCHECKS, KUMA, CRONITOR, BETTER]))
def test_a_text_never_changes_the_address(text: str, signal: Signal, url: str) -> None:
    call = call_of(url, signal, text.encode("utf-8", "replace").decode())
    if call is not None:
        assert (urlsplit(call.url).netloc, urlsplit(call.url).scheme) == (urlsplit(url).netloc, "https")
        assert urlsplit(call.url).path.startswith(urlsplit(url).path)
        assert len(call.body) <= MOST_TEXT


def test_what_podwatch_cannot_observe_is_withheld() -> None:
    assert {name: signal_of(name) for name in ("ok", "warning", "critical", "unknown")} == {
        "ok": Signal.SUCCESS,
        "warning": Signal.SUCCESS,
        "critical": Signal.FAIL,
        "unknown": None,
    }


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Service()
    yield made
    made.close()


async def twice(switch: DeadMan) -> None:
    await switch.beat(status())
    await switch.beat(status())


def test_a_night(service: Service) -> None:
    switch = DeadMan((service.url,), 10.0)

    async def night() -> None:
        await switch.beat(status("critical", "training is not running yet", step=None))
        await switch.beat(status())
        await switch.beat(status("critical", "GPU 0 is lost"))
        await switch.beat(status("unknown"))
        await switch.beat(status("warning", "the disk is 90 % full"))

    asyncio.run(night())
    path = urlsplit(service.url).path
    assert service.seen == [
        ("POST", f"{path}/start", "r: running; training is not running yet"),
        ("POST", path, "r: running, step 7"),
        ("POST", f"{path}/fail", "r: running, step 7; GPU 0 is lost"),
        ("POST", path, "r: running, step 7; the disk is 90 % full"),
    ]
    assert switch.findings(0.0) == ()


def test_a_url_that_fails_is_a_finding_without_its_key(service: Service) -> None:
    register_address(service.url)
    service.status = 404
    switch = DeadMan((service.url,), 10.0)
    asyncio.run(twice(switch))
    (found,) = switch.findings(1.0)
    assert (found.kind, "HTTP 404" in found.summary) == (FindingKind.NOTIFY_FAILING, True)
    assert "T0K3N" not in repr(found)
    service.status = 200
    asyncio.run(switch.beat(status()))
    assert switch.findings(2.0) == ()


def test_a_service_that_is_down(service: Service) -> None:
    service.close()
    switch = DeadMan((service.url, service.url), 5.0)
    asyncio.run(twice(switch))
    assert len(switch.findings(1.0)) == 2
