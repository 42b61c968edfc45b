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
        commands_read, commands_write = os.pipe()
        answers_read, answers_write = os.pipe()
        command = [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-extensions", "--disable-background-networking", f"--user-data-dir={home}"),
            *(f"--window-size={size[0]},{size[1]}", "--remote-debugging-pipe", "about:blank"),
        ]

        def connect_pipes() -> None:
            """Chromium reads commands at 3 and answers at 4, whatever numbers the pipes got here."""
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 100) for end in (commands_read, answers_write)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self.process = subprocess.Popen(
            command, preexec_fn=connect_pipes, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands_read)
        os.close(answers_write)
        self._write, self._read = commands_write, answers_read
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self.version: str = self._ask("Browser.getVersion")["product"]
        target = self._ask("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in target if each["type"] == "page")
        self.session = self._ask("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command to the page and return its result."""
        return self._ask(method, session=self.session, **parameters)

    def _ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError("Chromium ended")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        reply = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{script}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait(self, script: str, seconds: float = 40) -> None:
        """Wait until the expression is true."""
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
                page_state = f"The page: {shown}\nIt complained: {self.complaints()}"
                raise AssertionError(f"not within {seconds} s: {script}\n{page_state}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Enter": 13, "ArrowDown": 40, "ArrowUp": 38, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, " ": 32}
        for kind in ("keyDown", "keyUp"):
            more = {"windowsVirtualKeyCode": codes[key]} if key in codes else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **(text if kind == "keyDown" else {}), **more)

    def complaints(self) -> list[str]:
        """Return the errors and warnings that the page logged, including violations of its content security policy."""
        self.run("0")
        messages = [each["params"]["entry"]["text"] for each in self.events if each.get("method") == "Log.entryAdded"]
        for each in self.events:
            if each.get("method") == "Runtime.exceptionThrown":
                messages.append(str(each["params"]["exceptionDetails"]))
            if each.get("method") == "Runtime.consoleAPICalled" and each["params"]["type"] in ("error", "warning"):
                messages.append(str(each["params"]["args"]))
        return messages

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
    opened = Browser(home, size)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def dashboard(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `legato dashboard` over a folder in a process of its own; yield the process and the address it printed."""
    import sys

    command = [sys.executable, "-m", "legato.cli.main", "dashboard", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
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
