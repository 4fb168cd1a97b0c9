"""Create the pictures of the live page and of the report, next to the recordings: `python docs/screenshots.py`.

`docs/pictures/dashboard` contains the recordings of a job with four workers. `stream.txt` is the data that a browser
received when it opened the page while rank 0 was stopped. `events.jsonl` is the event log at the end. The script needs
`pip install 'ms_kungfu[browser,examples]'` and Chromium.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import ms_kungfu.launcher.dashboard
from ms_kungfu.launcher.dashboard.report import write_report

RECORDED = Path(__file__).resolve().parent / "pictures" / "dashboard"
FILES = Path(ms_kungfu.launcher.dashboard.__file__).parent
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class Replay(BaseHTTPRequestHandler):
    """Serves the page and the recorded stream. The stream stays open after the last event."""

    shown = threading.Event()

    def do_GET(self) -> None:
        name = self.path.strip("/") or "page.html"
        is_stream = name == "events"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else KINDS[name.partition(".")[2]])
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write((RECORDED / "stream.txt" if is_stream else FILES / name).read_bytes())
            if is_stream:
                self.shown.wait()

    def log_message(self, *arguments: object) -> None:
        pass


@contextlib.contextmanager
def replayed() -> Iterator[str]:
    """Return the URL of the page."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replay)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/#token=recorded"
    Replay.shown.set()
    server.shutdown()


def take(browser: Browser, url: str, name: str, width: int, scheme: str, ready: str, top: int | None = None) -> None:
    """Write one picture of the page, once its sentence contains `ready`. `top`: show only so many rows of pixels."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto(url)
    page.locator("#sentence", has_text=ready).wait_for()
    page.wait_for_timeout(1000)  # drawn twice a second
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True)))
    picture = picture.crop((0, 0, picture.width, top or picture.height))
    picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(
        RECORDED / f"{name}-{width}-{scheme}.png", optimize=True
    )
    page.close()


def main() -> int:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        print("screenshots.py: Chromium is not installed", file=sys.stderr)
        return 1
    with sync_playwright() as run, replayed() as url, tempfile.TemporaryDirectory() as folder:
        browser = run.chromium.launch(executable_path=found, args=["--no-sandbox"])
        report = Path(folder) / "report.html"
        write_report([RECORDED / "events.jsonl"], report)
        for width, scheme in ((1400, "light"), (400, "light"), (400, "dark")):
            take(browser, url, "page", width, scheme, "stopped by a signal")
        take(browser, url, "top", 1400, "light", "stopped by a signal", top=1030)
        take(browser, report.as_uri(), "report", 1400, "dark", "ended")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
