"""A headless Chromium, driven through its DevTools protocol on two pipes:
no driver and no port in between."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--remote-debugging-pipe", "--window-size=1400,900"),
)

KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
"""Windows key codes, and what a key types."""


class Browser:
    """One page. errors: uncaught exceptions,
    violations of the security policy and failures that the console tells.

    requested: URLs that the page asked for. Use as a context manager.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read_end, self._write = os.pipe()
        self._read, write_end = os.pipe()
        # The browser reads commands from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{read_end} 4>&{write_end}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self.errors: list[str] = []
        self.requested: list[str] = []
        self._rest = b""
        self._session: str | None = None
        self._num_calls = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def reload(self) -> None:
        self.value("window.isOld = true")
        self.call("Page.reload")
        self.wait_for("!window.isOld && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 15.0) -> None:
        """Wait for a JavaScript expression that must become true; fails if it does not."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} never came true; errors: {self.errors}"
            time.sleep(0.02)

    def write(self, element_id: str, text: str) -> None:
        """Type into an element as a person would."""
        self.value(f"document.getElementById({element_id!r}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, element_id: str) -> None:
        self.value(f"document.getElementById({element_id!r}).click()")

    def type(self, text: str) -> None:
        """Text to whatever has the focus."""
        self.call("Input.insertText", text=text)

    def key(self, name: str, shift: bool = False) -> None:
        """Press and release one of KEYS."""
        code, text = KEYS[name]
        pressed = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def look(self, width: int, height: int, scheme: str, is_phone: bool = False) -> None:
        """Be a screen of this size [CSS pixels] whose owner prefers ``scheme``, "dark" or "light"."""
        size = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 2 if is_phone else 1,
            "mobile": is_phone,
        }
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        frame, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(frame)
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
        return message
