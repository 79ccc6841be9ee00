"""Chromium over its debugging pipe: pages of a size and a colour scheme, what they log, keys, pictures."""

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

NAMES = (os.environ.get("PODWATCH_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if name and (path := shutil.which(name))), None)
PATIENCE = 120.0
"""Seconds for one answer: a browser starts slowly on a busy machine."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    def __init__(self, out: asyncio.StreamWriter, read: asyncio.StreamReader) -> None:
        self._out, self._in = out, read
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.events: dict[str, list[dict[str, Any]]] = {}
        self.changed = asyncio.Condition()
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while data := await self._in.readuntil(b"\0"):
            message = json.loads(data[:-1])
            if (number := message.get("id")) is not None:
                self._waiting.pop(number).set_result(message)
            else:
                async with self.changed:
                    self.events.setdefault(message.get("sessionId", ""), []).append(message)
                    self.changed.notify_all()

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._out.write(json.dumps(request | ({"sessionId": session} if session else {})).encode() + b"\0")
        got = await asyncio.wait_for(answer, PATIENCE)
        assert "error" not in got, (method, got)
        return got["result"]


class Page:
    """One tab. ``console``: everything that it logged, and every error."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    async def call(self, method: str, **params: Any) -> Any:
        return await self._browser.call(method, self._session, **params)

    @property
    def console(self) -> list[str]:
        logged = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        found = [e for e in self._browser.events.get(self._session, []) if e["method"] in logged]
        return [json.dumps(e["params"])[:600] for e in found]

    async def event(self, method: str) -> None:
        """Wait until it has happened."""

        def happened() -> bool:
            return any(e["method"] == method for e in self._browser.events.get(self._session, []))

        async with self._browser.changed:
            await asyncio.wait_for(self._browser.changed.wait_for(happened), PATIENCE)

    async def run(self, script: str) -> Any:
        got = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    async def until(self, script: str) -> Any:
        """Poll until the expression is true in the page."""
        end = asyncio.get_running_loop().time() + PATIENCE
        while not (value := await self.run(script)):
            assert asyncio.get_running_loop().time() < end, script
            await asyncio.sleep(0.05)
        return value

    async def key(self, key: str, code: int) -> None:
        text = {"Enter": "\r"}.get(key, "")
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, path: Path) -> None:
        got = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(got["data"]))


@contextlib.asynccontextmanager
async def opened(home: Path) -> AsyncIterator[Browser]:
    assert BROWSER is not None
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    command = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write} 2>/dev/null'
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, BROWSER, *FLAGS, f"--user-data-dir={home}", "about:blank",
        pass_fds=(to_read, from_write), stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_read)
    os.close(from_write)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 28)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_read, "rb"))
    out, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(to_write, "wb"))
    browser = Browser(asyncio.StreamWriter(out, protocol, None, loop), reader)
    try:
        yield browser
    finally:
        browser.reader.cancel()
        out.close()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def visit(
    browser: Browser,
    url: str,
    *,
    width: int = 390,
    height: int = 844,
    zoom: float = 1.0,
    dark: bool = False,
    script: bool = True,
    credentials: Sequence[str] = (),
) -> Page:
    """A new tab at ``url``, loaded. ``zoom`` as the browser's own: fewer and larger CSS pixels."""
    target = (await browser.call("Target.createTarget", url="about:blank"))["targetId"]
    session = (await browser.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
    page = Page(browser, session)
    for domain in ("Page", "Runtime", "Log"):
        await page.call(f"{domain}.enable")
    await page.call(
        "Emulation.setDeviceMetricsOverride",
        width=round(width / zoom), height=round(height / zoom), deviceScaleFactor=zoom, mobile=width < 600,
    )  # fmt: skip
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    await page.call("Emulation.setEmulatedMedia", features=[scheme])
    await page.call("Emulation.setScriptExecutionDisabled", value=not script)
    if credentials:
        basic = base64.b64encode(":".join(credentials).encode()).decode()
        await page.call("Network.enable")
        await page.call("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {basic}"})
    browser.events[session] = []
    await page.call("Page.navigate", url=url)
    await page.event("Page.loadEventFired")
    return page
