"""A headless Chromium for the tests of the live page. They are skipped if there is none."""

from __future__ import annotations

import shutil

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def chromium():
    """The machine's own browser: Playwright downloads none.

    It ends with the module, because Playwright keeps an event loop in this thread, and other tests begin loops here.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install ms-kungfu[browser]")
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page with what it logs, the errors of its scripts, and the addresses that it requests."""

    def __init__(self, page):
        self.page, self.errors, self.requests = page, [], []
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))


@pytest.fixture
def opened(chromium):
    """``opened(url, width=1400, scheme="light")`` opens a page."""
    pages = []

    def open_page(url, width=1400, scheme="light", **options):
        page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        pages.append(page)
        found = Opened(page)
        page.goto(url)
        return found

    yield open_page
    for page in pages:
        page.close()
