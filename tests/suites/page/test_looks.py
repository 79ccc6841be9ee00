"""The page as a reader has it, in each state, on a phone and a desktop: nothing logged, nothing cut off, enough
contrast, all of it within reach of the keyboard, with and without a script.

axe-core checks more where PODWATCH_AXE names its axe.min.js (`make test-page` gets it with npm). With
PODWATCH_PICTURES=DIRECTORY each test leaves its picture there."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report import views
from tests.report.test_page import HOSTILE, check
from tests.suites.page.browser import BROWSER, Browser, Page, opened, visit
from tests.suites.page.shown import STATES, Shown, day

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the page is not tried in a browser")

SIZES: dict[str, dict[str, Any]] = {
    "phone": {"width": 390},
    "phone-dark": {"width": 390, "dark": True},
    "phone-200": {"width": 390, "zoom": 2.0},
    "desktop": {"width": 1280, "height": 900},
    "desktop-200": {"width": 1280, "height": 900, "zoom": 2.0},
}
LINES = tuple(f"[trainer] Step {n} | Time: 241.3s | Reward: 0.43{n} | Loss: 0.0{n}" for n in range(71, 86))

CONTRAST = """
(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    for (let e = one; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || !one.getClientRects().length) continue;
    const a = light(parse(getComputedStyle(one).color)), b = light(behind(one));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(ratio.toFixed(2) + ' ' + texts.currentNode.textContent.trim().slice(0, 40));
  }
  const root = getComputedStyle(document.documentElement);
  for (const name of ['bar', 'bad', 'warnbar', 'dim']) {
    const one = document.createElement('i');
    one.setAttribute('class', 'probe');
    document.body.append(one);
    one.style.color = root.getPropertyValue('--' + name);
    const a = light(parse(getComputedStyle(one).color));
    for (const e of [document.body, document.querySelector('.chart') || document.body]) {
      const b = light(behind(e)), ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 3) bad.push(ratio.toFixed(2) + ' --' + name);
    }
    one.remove();
  }
  return bad;
})()
"""
CUT_OFF = """
[...document.querySelectorAll('body *')].filter((e) => {
  const r = e.getBoundingClientRect();
  return r.width && r.right > document.documentElement.clientWidth + 1 && !e.closest('.wide');
}).map((e) => e.tagName + ' ' + e.className + ' ' + Math.round(e.getBoundingClientRect().right)).slice(0, 5)
"""
FOCUSED = "document.activeElement === document.body ? '' : (document.activeElement.getAttribute('aria-label') || '?')"
AXE = "axe.run({resultTypes: ['violations']}).then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html))"


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with opened(tmp_path / "home") as made:
        yield made


async def picture(page: Page, name: str) -> None:
    if directory := os.environ.get("PODWATCH_PICTURES"):
        await page.picture(Path(directory) / f"{name}.png")


@pytest.mark.parametrize("size", SIZES)
async def test_each_state_can_be_read(size: str, browser: Browser) -> None:
    axe = os.environ.get("PODWATCH_AXE")
    for name, view in STATES.items():
        shown = Shown(view(), lines=() if name == "new-pod" else LINES, day=() if name == "new-pod" else day())
        url = await shown.server.start()
        try:
            page = await visit(browser, url, **SIZES[size])
            await picture(page, f"{name}-{size}")
            assert await page.run(CUT_OFF) == [], name
            assert await page.run("document.documentElement.scrollWidth <= innerWidth"), name
            assert await page.run(CONTRAST) == [], name
            if axe:
                await page.run(Path(axe).read_text())
                assert await page.run(AXE) == [], name
            assert page.console == [], name
        finally:
            await shown.server.stop()


async def test_the_plots_end_at_what_the_page_shows_as_now(browser: Browser) -> None:
    """docs/figures/page.png is made from these states."""
    shown = Shown(STATES["good"](), lines=LINES, day=day())
    url = await shown.server.start()
    try:
        page = await visit(browser, url)
        await page.until("document.querySelectorAll('.chart').length === 7")
        text = " ".join((await page.run("document.body.innerText")).split())
        for now, plotted in (
            ("inference · 71.0 GiB of 80.0 GiB", "GPU 0 memory: 71.0 GiB of 80.0 GiB"),
            ("trainer · 64.0 GiB of 80.0 GiB", "GPU 1 memory: 64.0 GiB of 80.0 GiB"),
            ("56 % of 250 GB used, 110 GB free", "Disk: 140 GB of 250 GB used"),
            ("one every 4 min", "(usually 240 s,"),
        ):
            assert now in text
            assert plotted in text
    finally:
        await shown.server.stop()


async def test_without_a_script_the_verdict_is_there(browser: Browser) -> None:
    shown = Shown(STATES["gave-up"](), lines=LINES, day=day())
    url = await shown.server.start()
    try:
        page = await visit(browser, url, script=False)
        await picture(page, "no-script")
        text = await page.run("document.body.innerText")
        assert "CRITICAL: TRAINING IS DOWN" in text
        assert "reload the page for newer values" in text
        assert "The plots need JavaScript." in text
        assert page.console == []
    finally:
        await shown.server.stop()


async def test_the_keyboard_reaches_what_can_be_used(browser: Browser) -> None:
    shown = Shown(STATES["gave-up"](), lines=LINES, day=day())
    url = await shown.server.start()
    try:
        page = await visit(browser, url)
        await page.call("Page.bringToFront")
        reached = []
        for _ in range(12):
            await page.key("Tab", 9)
            if not (label := await page.run(FOCUSED)) or label in reached:
                break
            outline = await page.run("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", label
            reached.append(label)
        assert "Copy podwatch start" in reached
        await page.run("window.copied = []; navigator.clipboard.writeText = async (text) => { copied.push(text); }")
        await page.run("document.querySelector('button.copy').focus()")
        await page.key("Enter", 13)
        await page.until("copied.length")
        assert await page.run("copied[0]") == "podwatch start"
        assert page.console == []
    finally:
        await shown.server.stop()


async def test_hostile_text_in_every_field_does_not_run_and_does_not_break_the_page(browser: Browser) -> None:
    view = views.gave_up()
    hostile = " ".join(HOSTILE).replace("\ud800", "")
    findings = tuple(replace(f, summary=hostile, suggestion=hostile) for f in view.findings)
    incident = replace(views.incident(resolved=True), summary=hostile, resolution=hostile)
    recovery = replace(view.recovery, detail=hostile)
    sync = replace(view.sync, store_url=hostile, error=hostile)
    moments = tuple(replace(one, state=hostile) for one in day())
    poisoned = views.changed(
        view, run_id=hostile, findings=findings, incidents=(incident,), layout=hostile, recovery=recovery, sync=sync,
        opening=hostile, output_dir=hostile, log_path=hostile, config_path=hostile,
        pins=dict.fromkeys((80, 85), hostile),
    )  # fmt: skip
    shown = Shown(poisoned, lines=(*(h.replace("\ud800", "") for h in HOSTILE), "x" * 3000), day=moments)
    url = await shown.server.start()
    try:
        page = await visit(browser, url)
        await page.run("window.alert = () => console.error('a script ran')")
        await picture(page, "hostile")
        assert await page.run(CUT_OFF) == []
        asked = shown.asked
        await page.run("dispatchEvent(new Event('online'))")
        await page.until("document.readyState === 'complete'")
        while shown.asked == asked:
            await page.run("new Promise(r => setTimeout(r, 50))")
        dom = await page.run("'<!doctype html>' + document.documentElement.outerHTML")
        check(dom.replace("</rect>", "").replace("</path>", ""))
        assert page.console == []
    finally:
        await shown.server.stop()


async def test_a_phone_that_slept_catches_up(browser: Browser) -> None:
    """Hidden pages ask for nothing; at the return the new values come at once."""
    shown = Shown(views.healthy(), lines=LINES, day=day())
    url = await shown.server.start()
    try:
        page = await visit(browser, url)
        hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s})"
        await page.run(hide % "true")
        later = replace(views.gave_up(), now_wall=views.WALL + 3600)
        shown.shown, shown.day = [later], (*day(), replace(day()[-1], at=views.WALL + 3000, started=True))
        await page.run(hide % "false" + "; document.dispatchEvent(new Event('visibilitychange'))")
        await page.until("document.getElementById('overall').textContent === 'CRITICAL'")
        assert page.console == []
    finally:
        await shown.server.stop()


async def test_with_a_password_the_page_renews_itself(browser: Browser) -> None:
    shown = Shown(views.healthy(), password="correct-horse-battery")
    url = await shown.server.start()
    try:
        page = await visit(browser, url.replace("://", "://me:correct-horse-battery@"))
        assert await page.run("document.getElementById('overall').textContent") == "OK"
        shown.shown = [views.gave_up()]
        await page.run("dispatchEvent(new Event('online'))")
        await page.until("document.getElementById('overall').textContent === 'CRITICAL'")
        assert page.console == []
    finally:
        await shown.server.stop()
