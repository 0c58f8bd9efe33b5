"""Headless Chromium that stays open: the DevTools protocol over its pipe, for pages that never stop loading."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.report.browser import CHROMIUM, FLAGS

PATIENCE = 60  # seconds


class Tab:
    """One page. Commands are answered in order; what goes wrong in the page is kept in `errors`."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._received, self._number = read, write, b"", 0
        self.errors: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._send(f"{domain}.enable")

    def open(self, address: str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._send("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._send("Emulation.setEmulatedMedia", features=scheme)
        self._send("Page.navigate", url=address)
        self.errors.clear()  # of the page before, whose service may be gone
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        given = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self._send("Runtime.evaluate", **given)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Until the expression holds."""
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(f"Boolean({script})"):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._send("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._send("Input.dispatchKeyEvent", type="keyUp", **key)

    def picture(self, *, whole: bool = True) -> bytes:
        """A PNG of the page."""
        return base64.b64decode(self._send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser is gone"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told

    def _note(self, told: dict[str, Any]) -> None:
        content = told.get("params", {})
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(content["exceptionDetails"]))
        if told.get("method") == "Log.entryAdded" and content["entry"]["level"] == "error":
            self.errors.append(content["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, which ends with the block."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()

    def give_pipes() -> None:  # the browser reads commands from 3 and answers on 4
        high_in, high_out = (os.dup2(end, 100 + i) for i, end in enumerate((theirs_in, theirs_out)))
        os.dup2(high_in, 3)
        os.dup2(high_out, 4)

    command = [str(CHROMIUM), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    child = subprocess.Popen(
        command, close_fds=False, preexec_fn=give_pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for end in (theirs_in, theirs_out):
        os.close(end)
    try:
        yield Tab(ours_in, ours_out)
    finally:
        child.kill()
        child.wait(PATIENCE)
        for end in (ours_in, ours_out):
            os.close(end)
