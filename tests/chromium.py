"""A headless Chromium, driven over the pipe of its DevTools protocol: no driver, no package. No tests."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PATIENCE_S = 120


def program() -> str | None:
    """Debian's, or another that is called so."""
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Page:
    """One tab. `complaints`: what its console and its scripts said that is wrong; `requests`: every URL it asked for."""

    def __init__(self, send: Any, receive: Any):
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._send, self._receive = send, receive
        self._answers: dict[int, queue.Queue] = {}
        self._n = 0
        self._session: str | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._n += 1
        n = self._n
        waiting = self._answers[n] = queue.Queue()
        message = {"id": n, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        self._send.flush()
        answer = waiting.get(timeout=PATIENCE_S)
        del self._answers[n]
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _listen(self) -> None:
        held = b""
        with contextlib.suppress(OSError, ValueError):
            while part := self._receive.read1(65536):
                *whole, held = (held + part).split(b"\0")
                for message in whole:
                    self._heard(json.loads(message))
        for waiting in tuple(self._answers.values()):
            waiting.put({"error": "the browser has ended"})

    def _heard(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._answers[message["id"]].put(message)
            return
        params = message["params"]
        match message["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(json.dumps(params["entry"]))

    # --- what tests say

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, script: str) -> Any:
        """The script's first value that is true."""
        end = time.monotonic() + PATIENCE_S
        while not (value := self.value(script)):
            assert time.monotonic() < end, (
                f"never: {script}; the page: {self.value('document.body.innerText')}; {self.complaints}"
            )
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Where the focus is."""
        self.call("Input.insertText", text=text)

    def press_enter(self) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Page]:
    found = program()
    assert found is not None
    to_it, from_us = os.pipe()
    to_us, from_it = os.pipe()
    # The protocol is on file descriptors 3 and 4; bash puts them there in the child.
    command = [
        "bash", "-c", f'exec 3<&{to_it} 4>&{from_it} && exec "$@"', "chromium", found, "--headless=new",
        "--no-sandbox",  # tests may run as root
        "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}", "about:blank",
    ]  # fmt: skip
    with open(folder / "chromium.log", "wb") as log:
        process = subprocess.Popen(command, pass_fds=(to_it, from_it), stdout=log, stderr=log, start_new_session=True)
    os.close(to_it)
    os.close(from_it)
    with os.fdopen(from_us, "wb") as send, os.fdopen(to_us, "rb") as receive:
        page = None
        try:
            page = Page(send, receive)
            yield page
            page._session = None
            with contextlib.suppress(Exception):
                page.call("Browser.close")
        finally:
            # All its processes: as long as one has the pipe open, the listener reads, and a file that is read cannot be closed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if page is not None:
                page._listener.join(PATIENCE_S)
