"""A headless browser for tests: opens a page, says what went wrong in it, measures it, takes its picture."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import websockets

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# What the browser answers when the page reloads while a question is open: the question is put to the new page.
RELOADED = (
    "Inspected target navigated or closed",
    "Cannot find default execution context",
    "Promise was collected",
)


@dataclass
class Seen:
    """What a page did."""

    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    picture: bytes = b""


def look_at(address: str, width: int, *questions: str, dark: bool = False, printed: bool = False) -> Seen:
    """Open `address` in a window of this width; the answers are what JavaScript `questions` give, in order."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-port=0", "--remote-allow-origins=*",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on " in line)
            port = line.partition("127.0.0.1:")[2].partition("/")[0]
            return asyncio.run(_look(int(port), address, width, questions, dark=dark, printed=printed))
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


async def _look(
    port: int, address: str, width: int, questions: tuple[str, ...], *, dark: bool, printed: bool
) -> Seen:
    targets = json.loads(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list").read())
    target = next(target for target in targets if target["type"] == "page")["webSocketDebuggerUrl"]
    seen, number = Seen(), 0
    async with websockets.connect(target, max_size=2**26) as socket:

        async def ask(method: str, until: str = "", **parameters: Any) -> Any:
            nonlocal number
            number += 1
            await socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
            answer, heard = None, not until
            while answer is None or not heard:
                message = json.loads(await asyncio.wait_for(socket.recv(), 60))
                if message.get("id") == number:
                    answer = message
                _note(seen, message)
                heard = heard or message.get("method") == until
            if "error" in answer and answer["error"]["message"] in RELOADED:
                await asyncio.sleep(0.3)
                return {"left": True, "exceptionDetails": answer["error"]}
            assert "error" not in answer, answer
            return answer["result"]

        for domain in ("Page", "Runtime", "Log", "Network"):
            await ask(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await ask("Emulation.setEmulatedMedia", media="print" if printed else "", features=[scheme])
        screen: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        await ask("Emulation.setDeviceMetricsOverride", **screen)
        await ask("Page.navigate", until="Page.loadEventFired", url=address)
        for question in questions:
            for _ in range(20):
                given = await ask("Runtime.evaluate", expression=question, returnByValue=True, awaitPromise=True)
                if "left" not in given:
                    break
            assert "exceptionDetails" not in given, given
            seen.answers.append(given["result"].get("value"))
        shot = await ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        seen.picture = base64.b64decode(shot["data"])
    return seen


def _note(seen: Seen, message: dict[str, Any]) -> None:
    parameters = message.get("params", {})
    match message.get("method"):
        case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
            seen.complaints.append(json.dumps(parameters["args"]))
        case "Runtime.exceptionThrown":
            seen.complaints.append(json.dumps(parameters["exceptionDetails"]))
        case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
            seen.complaints.append(parameters["entry"]["text"])
        case "Network.requestWillBeSent":
            seen.requests.append(parameters["request"]["url"])
