"""Notices on their way: real programs, a real web server on loopback, and everything that can go wrong with them."""

import asyncio
import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from podwatch.domain.event import Change, Notice, Topic
from podwatch.domain.finding import FindingKind, Severity
from podwatch.domain.secrets import register, register_address, scrub
from podwatch.report.alerts import channel_of
from podwatch.report.deliver_notices import (
    QUEUE,
    CommandChannel,
    Notifier,
    NotSent,
    UrlChannel,
    document_of,
    shown_url,
)
from podwatch.system import procfs
from tests.support.pod import LIMITS


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def notice(severity: Severity = Severity.CRITICAL, text: str = "31 GB are free", **more: Any) -> dict[str, Any]:
    made = Notice(
        Topic.NEEDS_OPERATOR, Change.OPENED, severity, "disk-no-room", text, "disk-no-room", 1.7e9, do="", **more
    )
    return document_of(made, run_id="r1", host="pod")


class Web:
    """``answers`` are statuses, one for each request, the last for all that follow."""

    def __init__(self) -> None:
        self.answers = [200]
        self.hang = threading.Event()
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                web.seen.append((self.path, dict(self.headers), body))
                status = web.answers.pop(0) if len(web.answers) > 1 else web.answers[0]
                if status == 0:
                    web.hang.wait(20)
                    return
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"said")

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.place = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.close()


async def test_the_owners_program_gets_it_on_stdin_and_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B2_APPLICATION_KEY", "not-for-others")
    out = tmp_path / "out"
    script = 'cat; echo; echo "$PODWATCH_SEVERITY|$PODWATCH_TITLE|$PODWATCH_TEXT|$B2_APPLICATION_KEY|$1"'
    channel = CommandChannel(("/bin/sh", "-c", f"{{ {script}; }} > {out}", "sh", "$(id) ; x"), 10.0)
    await channel.send(notice(text="line 1\nline 2; $(touch /tmp/never)"))
    lines = out.read_text().splitlines()
    assert json.loads(lines[0])["text"] == "line 1\nline 2; $(touch /tmp/never)"
    assert lines[2:] == ["critical|r1: disk-no-room|line 1", "line 2; $(touch /tmp/never)||$(id) ; x"]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("/bin/sh", "-c", "echo no such user >&2; exit 3"), "exit 3: no such user"),
        (("/no/such/program",), "cannot run /no/such/program"),
        (("/bin/sh", "-c", "kill -9 $$"), "exit -9"),
    ],
)
async def test_a_program_that_fails(argv: tuple[str, ...], why: str) -> None:
    with pytest.raises(NotSent, match=why):
        await CommandChannel(argv, 10.0).send(notice())


async def test_a_program_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    for limit in LIMITS:
        channel = CommandChannel(("/bin/sh", "-c", f"sleep 60 & echo $$ $! > {pids}; wait"), limit)
        with pytest.raises(NotSent, match="did not end within"):
            await channel.send(notice())
        if pids.exists() and pids.read_text():
            break
    for pid in map(int, pids.read_text().split()):
        deadline = time.monotonic() + 60
        while (found := procfs.read_stat(pid)) is not None and found.state not in "ZX":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_a_url_gets_the_document_and_its_key_is_in_no_argument(web: Web) -> None:
    sent = notice()
    web.answers = [200]
    await UrlChannel(f"http://me:hunter2secret@{web.place}/hook/T0K3N123?x=1", 10.0).send(sent)
    ((path, headers, body),) = web.seen
    assert (path, json.loads(body)) == ("/hook/T0K3N123?x=1", sent)
    assert headers["Authorization"] == "Basic bWU6aHVudGVyMnNlY3JldA=="
    assert headers["Content-Type"] == "application/json"
    web.answers = [0]
    hanging = asyncio.create_task(UrlChannel(f"http://{web.place}/T0K3N123", 5.0).send(sent))
    while len(web.seen) < 2:
        await asyncio.sleep(0.01)
    arguments = [" ".join(procfs.command(pid)) for pid in procfs.all_pids()]
    assert any("notify_child" in a for a in arguments)
    assert not any("T0K3N123" in a for a in arguments)
    hanging.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await hanging


@pytest.mark.parametrize(
    ("status", "final"), [(302, True), (404, True), (429, False), (503, False), (0, False)], ids=str
)
async def test_an_answer_that_is_no(web: Web, status: int, final: bool) -> None:
    for limit in (10.0,) if status else LIMITS:
        web.answers = [status]
        with pytest.raises(NotSent) as failed:
            await UrlChannel(f"http://{web.place}/hook", limit).send(notice())
        if web.seen:
            break
    assert failed.value.final is final
    assert (f"HTTP {status}" if status else "timed out") in str(failed.value)
    assert len(web.seen) == 1, "a redirect is not followed: the key in the URL belongs to this host"


async def test_nobody_there_and_what_is_no_web_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(NotSent, match="refused") as failed:
            await UrlChannel(f"http://127.0.0.1:{taken.getsockname()[1]}/", 5.0).send(notice())
    assert not failed.value.final
    with pytest.raises(NotSent, match=r"podwatch\[notify\]|does not understand") as failed:
        await UrlChannel("nosuchscheme://x/y", 5.0).send(notice())
    assert failed.value.final


class Flaky:
    """Refuses the first ``bad`` attempts."""

    name = "flaky"

    def __init__(self, bad: int, *, final: bool = False, error: Exception | None = None) -> None:
        self.bad, self.final, self.error = bad, final, error
        self.got: list[str] = []
        self.attempts = 0

    async def send(self, document: Any) -> None:
        self.attempts += 1
        if self.attempts <= self.bad:
            raise self.error or NotSent("no route to token-4711-secret", final=self.final)
        self.got.append(document["text"])


async def no_sleep(seconds: float) -> None:
    await asyncio.sleep(0)


async def test_it_is_tried_again_in_order_and_said_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    register_address("https://x/token-4711-secret")
    pauses: list[float] = []
    going = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            await going.wait()

    channel = Flaky(4)
    notifier = Notifier([channel], sleep)
    for text in ("one", "two"):
        notifier.tell(notice(text=text))
    while len(pauses) < 2:
        await asyncio.sleep(0.001)
    (finding,) = notifier.findings(5.0)
    assert (finding.kind, finding.severity, finding.subject) == (
        FindingKind.NOTIFY_FAILING, Severity.WARNING, "flaky",
    )  # fmt: skip
    assert "token-4711-secret" not in finding.summary
    assert "[removed]" in finding.summary
    going.set()
    while len(channel.got) < 2:
        await asyncio.sleep(0.001)
    assert channel.got == ["one", "two"]
    assert pauses == [5.0, 15.0, 45.0, 135.0]
    assert notifier.findings(6.0) == ()
    await notifier.close()


@pytest.mark.parametrize("error", [None, RuntimeError("a bug")], ids=["refused for good", "a bug"])
async def test_what_cannot_succeed_is_given_up_and_the_next_one_goes(error: Exception | None) -> None:
    channel = Flaky(1, final=True, error=error)
    notifier = Notifier([channel], no_sleep)
    notifier.tell(notice(text="one"))
    await notifier.flush(5.0)
    (finding,) = notifier.findings(0.0)
    assert "(1 lost)" in finding.summary
    notifier.tell(notice(text="two"))
    await notifier.flush(5.0)
    assert (channel.got, notifier.findings(0.0)) == (["two"], ())
    await notifier.close()


async def test_eight_attempts_and_no_more() -> None:
    channel = Flaky(1000)
    notifier = Notifier([channel], no_sleep)
    notifier.tell(notice())
    await notifier.flush(5.0)
    assert channel.attempts == 8
    await notifier.close()


async def test_what_waits_has_one_more_chance_when_podwatch_leaves() -> None:
    channel = Flaky(2)
    notifier = Notifier([channel], asyncio.sleep)
    notifier.tell(notice(text="last words"))
    while channel.attempts < 1:
        await asyncio.sleep(0.001)
    began = time.monotonic()
    await notifier.flush(60.0)
    await notifier.close()
    assert (channel.got, time.monotonic() - began < 30) == (["last words"], True)


async def test_a_full_queue_lets_the_least_important_go() -> None:
    channel = Flaky(0)
    notifier = Notifier([channel], no_sleep)
    notifier.tell(notice(Severity.INFO, "info"))
    for number in range(QUEUE + 5):
        notifier.tell(notice(text=str(number)))
    await notifier.flush(5.0)
    assert channel.got == [str(n) for n in range(5, QUEUE + 5)]
    await notifier.close()


async def test_one_that_hangs_holds_up_neither_the_other_nor_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    notifier = Notifier(
        [CommandChannel(("/bin/sleep", "60"), 60.0), CommandChannel(("/bin/sh", "-c", f"cat >> {out}"), 10.0)],
        asyncio.sleep,
    )
    began = time.monotonic()
    notifier.tell(notice())
    assert time.monotonic() - began < 5, "telling never waits for one that takes a minute"
    while not (out.exists() and out.read_text()):
        await asyncio.sleep(0.01)
    began = time.monotonic()
    await notifier.flush(0.1)
    await notifier.close()
    assert time.monotonic() - began < 20


def test_secrets_in_urls_are_hidden_and_ordinary_words_are_not() -> None:
    for address in (
        "https://hooks.example.com/services/T024BE7LD/abcDEF123456", "tgram://12345:AbC/99887766",
         "https://me:pa55word@h/x", "ntfy://my-private-topic",
    ):  # fmt: skip
        register_address(address)
    for secret in ("T024BE7LD", "abcDEF123456", "99887766", "pa55word", "ntfy://my-private-topic"):
        assert secret not in scrub(f"failed for {secret}: services of hooks.example.com")
    assert scrub("services of hooks.example.com") == "services of hooks.example.com"
    assert shown_url("https://me:pw@hooks.example.com:8443/T1/x?y=z") == "https://hooks.example.com:8443/..."
    assert shown_url("tgram://12345:AbC/1") == "tgram://..."
    assert shown_url("http://[broken/x") == "http://..."


def test_a_secret_in_a_finding_does_not_leave() -> None:
    register("K005verysecret")
    document = notice(text="b2 said: K005verysecret is wrong", fields={"key": "K005verysecret"}, unsent=3)
    assert "K005verysecret" not in json.dumps(document)
    assert "3 more not sent" in document["text"]


def test_the_daemon_does_not_load_what_only_the_child_needs() -> None:
    code = (
        "import sys, podwatch.app.main; bad = [m for m in ('apprise', 'wandb', 'podwatch.report.alerts',"
        " 'podwatch.report.deliver_notices') if m in sys.modules]; sys.exit(' '.join(bad) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(importlib.util.find_spec("apprise") is None, reason="apprise is not installed: make test-telling")
async def test_other_schemes_go_through_apprise(web: Web) -> None:
    channel = UrlChannel(f"json://{web.place}/T0K3N-4711", 10.0)
    await channel.send(notice())
    ((_, _, body),) = web.seen
    assert (json.loads(body)["message"], json.loads(body)["type"]) == ("31 GB are free", "failure")
    web.answers = [500]
    with pytest.raises(NotSent, match="500") as failed:
        await channel.send(notice())
    assert "T0K3N" not in str(failed.value)


@pytest.mark.parametrize(
    ("least", "gets"),
    [
        (None, ["usual"]),
        (Severity.CRITICAL, ["over"]),
        (Severity.WARNING, ["over", "warning"]),
        (Severity.INFO, ["usual", "over", "warning"]),
    ],
)
async def test_each_channel_gets_the_notices_of_its_severity(least: Severity | None, gets: list[str]) -> None:
    """The end of a critical condition is for those who got its beginning, though it is no bad news itself."""
    channel = Flaky(0)
    channel.least = least  # type: ignore[attr-defined]
    notifier = Notifier([channel], no_sleep)
    for text, severity, weight, usual in (
        ("usual", Severity.INFO, None, True),
        ("over", Severity.INFO, Severity.CRITICAL, False),
        ("warning", Severity.WARNING, None, False),
    ):
        made = Notice(
            Topic.NEEDS_OPERATOR, Change.OPENED, severity, "t", text, "k", 1.7e9, do="", weight=weight, usual=usual
        )
        notifier.tell(document_of(made, run_id="r1", host="pod"), made)
    await notifier.flush(5.0)
    assert channel.got == gets
    await notifier.close()


def test_pagerduty_opens_and_resolves_one_alert(web: Web, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32 + "\n")
    script = Path(__file__).parents[2] / "examples" / "notify" / "pagerduty.py"

    def run(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), str(key)], input=json.dumps(document), text=True, capture_output=True,
            env={"PAGERDUTY_URL": f"http://{web.place}/v2/enqueue"}, check=False,
        )  # fmt: skip

    web.answers = [202, 202, 400]
    opened = notice()
    assert run(opened).returncode == run({**opened, "change": "closed", "severity": "info"}).returncode == 0
    assert run(opened).returncode != 0, "podwatch tries again"
    sent = [json.loads(body) for _, _, body in web.seen]
    assert [one["event_action"] for one in sent[:2]] == ["trigger", "resolve"]
    assert {one["dedup_key"] for one in sent} == {"podwatch/r1/disk-no-room"}
    assert sent[0]["routing_key"] == "k" * 32
    assert sent[0]["payload"]["severity"] == "critical"


def copyable() -> list[str]:
    """The lines of docs/notifications.md that are copied into urls_file, with something in each placeholder."""
    page = (Path(__file__).parents[2] / "docs" / "notifications.md").read_text()
    block = page.split("\n## Services\n")[1].split("\n\n")[1]
    lines = [line.partition("   #")[0].strip() for line in block.splitlines()]
    names = {"<T...>": "T1JJ3T3L2", "<B...>": "A1BRTD4JD", "<key>": "TIiajkdnlazkcOXrIdevi7FQ", "<user>": "u"}
    names |= {"<webhook id>": "4" * 24, "<webhook token>": "B" * 64, "<password>": "p", "<chat id>": "12345"}
    names |= {"<bot token>": "123456789:abcdefg_hijklmnop", "<a topic that is hard to guess>": "x8Jd"}
    for name, value in names.items():
        lines = [line.replace(name, value) for line in lines]
    return lines


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of apprise's own imports
@pytest.mark.parametrize("line", copyable())
def test_the_lines_to_copy_are_understood(line: str) -> None:
    least, url = channel_of(line)
    assert least is not None
    assert "<" not in url
    if url.startswith("https://"):
        return
    apprise = pytest.importorskip("apprise", reason="apprise is not installed: make test-telling")
    assert apprise.Apprise().add(url), url
