"""Drives Debian's chromium over its own protocol (DevTools)."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium")


class Browser:
    """A tab of a browser without a window.

    Attributes:
        requests: addresses that the page has asked for.
        errors: messages of the page's console that are errors, and uncaught exceptions.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the protocol; returns its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": arguments}))
        while True:
            message = json.loads(self._connection.recv(timeout=30))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._take(message)

    def _take(self, message: Any) -> None:
        content = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(content["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(content["exceptionDetails"].get("exception", {}).get("description")))
        elif message["method"] == "Log.entryAdded" and content["entry"]["level"] == "error":
            self.errors.append(content["entry"]["text"])

    def show(self, address: str, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Opens an address in a window of this size."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, for which it waits where it is a promise."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str, limit_s: float = 30.0) -> Any:
        """Returns the value of an expression once it is true."""
        end = time.monotonic() + limit_s
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"{expression} is {found!r}; {self.errors}"
            time.sleep(0.05)
        return found

    def press(self, key: str, code: int, text: str = "") -> None:
        """Presses a key and lets it go."""
        for kind in ("keyDown", "keyUp"):
            words = {"key": key, "windowsVirtualKeyCode": code, "text": text if kind == "keyDown" else ""}
            self.send("Input.dispatchKeyEvent", type=kind, **words)

    def tree(self) -> list[tuple[str, str, str]]:
        """Returns role, name and description of all that a screen reader finds."""

        def text(node: Any, part: str) -> str:
            return str(node.get(part, {}).get("value", ""))

        nodes = [one for one in self.send("Accessibility.getFullAXTree")["nodes"] if not one["ignored"]]
        return [(text(one, "role"), text(one, "name"), text(one, "description")) for one in nodes]

    def window(self, address: str) -> Browser:
        """Opens an address in a further window, which ends with the browser."""
        target = self.send("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        port = self._connection.remote_address[1]
        other = Browser(connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None, ping_interval=None))
        other.show(address)
        return other

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Writes what is shown as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Starts a browser, and ends it."""
    assert CHROMIUM is not None
    words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    words += ["--disable-component-update", "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen([CHROMIUM, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = folder / "DevToolsActivePort"
        end = time.monotonic() + 30
        while not (port.exists() and len(port.read_text().split()) == 2):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        with urllib.request.urlopen(f"http://127.0.0.1:{port.read_text().split()[0]}/json") as answer:
            tab = next(one for one in json.load(answer) if one["type"] == "page")
        with connect(tab["webSocketDebuggerUrl"], max_size=None, ping_interval=None) as connection:
            yield Browser(connection)
    finally:
        process.kill()
        process.wait()
