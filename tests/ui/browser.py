# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium over its debugging pipe: open a page, run a line of script, take a picture."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Browser:
    """One browser with one page. `async with`."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        """What the page wrote as an error, and exceptions it did not catch."""

    async def __aenter__(self) -> Browser:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        self._process = await asyncio.create_subprocess_exec(
            "bash", "-c", f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}', "bash",  # the descriptors Chromium speaks on
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, pass_fds=(theirs_in, theirs_out),
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        reader = asyncio.StreamReader(limit=64 << 20)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._in, "rb", buffering=0)
        )
        self._reading = asyncio.create_task(self._read(reader))
        target = (await self._send("Target.createTarget", url="about:blank"))["targetId"]
        self._page = (await self._send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._process.terminate()
        await self._process.wait()
        self._reading.cancel()
        self._transport.close()
        os.close(self._out)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A call of the page's debugging protocol."""
        return await self._send(method, self._page, **parameters)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str, tries: int = 600) -> Any:
        """Wait until an expression is true. Its last value is in the error."""
        for _ in range(tries):
            if value := await self.evaluate(script):
                return value
            await asyncio.sleep(0.05)
        raise AssertionError(
            f"{script} never became true; the page says: {await self.evaluate('document.body.innerText')}"
        )

    async def screen(self, width: int, height: int, scheme: str) -> None:
        """The window's size and the preferred colours."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=width < 600)  # fmt: skip
        await self.call("Emulation.setScrollbarsHidden", hidden=True)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, file: Path) -> Path:
        """A PNG of the whole page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(shot["data"]))
        return file

    async def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        await asyncio.to_thread(os.write, self._out, json.dumps(message).encode() + b"\0")
        return await asyncio.wait_for(self._waiting[number], 60)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = json.loads((await reader.readuntil(b"\0"))[:-1])
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(message["params"]["exceptionDetails"])[:500])
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(json.dumps(message["params"]["entry"])[:500])
            waiting = self._waiting.get(message.get("id", -1))
            if waiting is not None and not waiting.done():
                if "error" in message:
                    waiting.set_exception(RuntimeError(str(message["error"])))
                else:
                    waiting.set_result(message["result"])
