"""The page in a real browser: no console error, no violation of its policy, no hostile text that runs, and new values
without a reload. Needs Chromium (Debian: chromium); PODWATCH_CHROMIUM names another one."""

import asyncio
import re
from dataclasses import replace

import pytest

from tests.report import views
from tests.report.test_page import HOSTILE, check
from tests.suites.page.browser import BROWSER
from tests.suites.page.shown import Shown

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the page is not tried in a browser")


async def browse(shown: Shown, home, *, seconds: int = 0) -> tuple[str, list[str]]:
    """The page as the browser has it, ``seconds`` of its own time after it was loaded, and the lines of its
    console."""
    url = await shown.server.start()
    try:
        process = await asyncio.create_subprocess_exec(
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
            f"--user-data-dir={home}", "--enable-logging=stderr", "--window-size=390,844", "--dump-dom",
            *([f"--virtual-time-budget={seconds * 1000}"] if seconds else []), f"{url}/",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, log = await asyncio.wait_for(process.communicate(), 120)
    finally:
        await shown.server.stop()
    return out.decode(), [line for line in log.decode(errors="replace").splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("name", ["running", "dead-recovering", "gave-up", "not-backed-up"])
async def test_the_script_runs_and_the_console_stays_empty(name: str, tmp_path) -> None:
    dom, console = await browse(Shown(views.ALL[name]()), tmp_path)
    assert not console
    assert '<html lang="en" class="js">' in dom
    assert dom.count("data-part") - dom.count("[data-part]") == 5


async def test_hostile_text_does_not_run(tmp_path) -> None:
    view = views.gave_up()
    hostile = " ".join(HOSTILE).replace("\ud800", "")
    findings = tuple(replace(f, summary=hostile, suggestion=hostile) for f in view.findings)
    incident = replace(views.incident(resolved=True), summary=hostile, resolution=hostile)
    poisoned = replace(view, run_id=hostile, findings=findings, incidents=(incident,), layout=hostile)
    dom, console = await browse(Shown(poisoned, lines=HOSTILE), tmp_path)
    assert not console
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in dom
    check(dom.replace("</rect>", "").replace("</path>", ""))
    assert not re.search(r"<(?:img|a|b [^>]*on)", dom)


async def test_new_values_come_without_a_reload(tmp_path) -> None:
    shown = Shown(views.healthy(), views.gave_up())
    dom, console = await browse(shown, tmp_path, seconds=12)
    assert not console
    assert shown.asked > 1
    assert 'id="overall">CRITICAL<' in dom
    assert re.search(r'id="stale" role="status">CRITICAL: TRAINING IS DOWN', dom)
    assert "<title>CRITICAL" in dom


async def test_it_says_when_podwatch_no_longer_answers(tmp_path) -> None:
    shown = Shown(views.healthy(), None)  # from the second request on, an error inside podwatch
    dom, console = await browse(shown, tmp_path, seconds=31)
    assert re.search(r"No answer from podwatch for \d+ s: the values below are old", dom)
    assert 'id="overall">OK<' in dom
    assert all("500" in line for line in console)
