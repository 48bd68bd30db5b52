"""Headless Chromium over its debugging pipe, for page tests; skipped if Chromium is missing."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 60
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Browser:
    """One browser tab."""

    def __init__(self) -> None:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        if found is None:
            pytest.skip("there is no Chromium")
        self._home = tempfile.TemporaryDirectory(prefix="edge-browser-")
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                   f"--user-data-dir={self._home.name}", "--remote-debugging-pipe"]  # fmt: skip
        # Chromium reads commands from descriptor 3 and answers on 4
        line = f'exec 3<&{commands} 4>&{answers}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", line, "bash", found, *options, "about:blank"],
            pass_fds=(commands, answers), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._held, self._count, self._session = b"", 0, ""
        self.said: list[str] = []  # errors, and what the content policy blocked
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(one["targetId"] for one in pages if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        time.sleep(0.1)
        self._home._finalizer.detach()  # type: ignore[attr-defined]
        shutil.rmtree(self._home.name, ignore_errors=True)  # child processes may still write there

    def send(self, method: str, **params: Any) -> Any:
        """Send a command and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._received()).get("id") != self._count:
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.said.append(json.dumps(answer["params"]))
        assert "error" not in answer, answer
        return answer["result"]

    def _received(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser ended"
            self._held += piece
        line, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        """Open a URL in a window of this size; below 600 pixels it emulates a phone."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """Evaluate an expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression is true."""
        last = time.monotonic() + PATIENCE
        while not self.value(script):
            assert time.monotonic() < last, (script, self.value("document.body.innerText"))
            time.sleep(0.03)

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        more = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **more)
        self.send("Input.dispatchKeyEvent", type="keyUp", **more)

    def screenshot(self, path: Path) -> None:
        """Return a PNG of the visible page."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))
