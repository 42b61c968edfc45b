"""A headless Chromium from the system's packages, driven over the pipe of its DevTools: no driver, no download."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
MISSING = "no Chromium on this machine: `apt-get install chromium` and these tests run"


class Browser:
    """One browser with one page."""

    def __init__(self, home: Path, size: tuple[int, int] = (1440, 1000)) -> None:
        assert CHROMIUM is not None
        away, theirs = os.pipe()
        back, mine = os.pipe()
        words = [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-extensions", "--disable-background-networking", f"--user-data-dir={home}"),
            *(f"--window-size={size[0]},{size[1]}", "--remote-debugging-pipe", "about:blank"),
        ]

        def placed() -> None:
            """Chromium reads commands at 3 and answers at 4, whatever numbers the pipes got here."""
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (away, mine)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            words, preexec_fn=placed, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(away)
        os.close(mine)
        self._write, self._read = theirs, back
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.version: str = self._ask("Browser.getVersion")["product"]
        target = self._ask("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in target if each["type"] == "page")
        self.session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to the page."""
        return self._ask(method, session=self.session, **parameters)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("Chromium ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 40) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while True:
            try:
                value = self.run(f"!!({script})")
            except RuntimeError:
                value = None  # between two pages there is nothing to ask
            if value:
                return
            if time.monotonic() > end:
                shown = self.run("document.body.innerText.slice(0, 2000)")
                told = f"The page: {shown}\nIt complained: {self.complaints()}"
                raise AssertionError(f"not within {seconds} s: {script}\n{told}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """A key, as a person would."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, " ": 32}
        for kind in ("keyDown", "keyUp"):
            more = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}), **more)

    def complaints(self) -> list[str]:
        """What the page logged as errors, and violations of its content security policy among them."""
        self.run("0")
        found = [each["params"]["entry"]["text"] for each in self.events if each.get("method") == "Log.entryAdded"]
        for each in self.events:
            if each.get("method") == "Runtime.exceptionThrown":
                found.append(str(each["params"]["exceptionDetails"]))
            if each.get("method") == "Runtime.consoleAPICalled" and each["params"]["type"] in ("error", "warning"):
                found.append(str(each["params"]["args"]))
        return found

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        try:
            self._ask("Browser.close")
        except (OSError, RuntimeError):
            self.process.kill()
        self.process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)


@contextmanager
def browser(home: Path, size: tuple[int, int] = (1440, 1000)) -> Iterator[Browser]:
    found = Browser(home, size)
    try:
        yield found
    finally:
        found.close()


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`legato dashboard` over a folder in a process of its own, and the address it printed."""
    import sys

    words = [sys.executable, "-m", "legato.cli.main", "dashboard", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is shown at http://127.0.0.1:" in line, line
        yield process, line.rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(timeout=20)
        assert process.stdout is not None
        process.stdout.close()
