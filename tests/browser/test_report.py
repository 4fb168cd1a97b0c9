"""report.html in a browser, from the disk: the same page without a server."""

from __future__ import annotations

import re

import pytest

from ms_kungfu import job_events as e
from ms_kungfu.launcher.dashboard.report import write_report
from ms_kungfu.launcher.state.account import JobAccount
from ms_kungfu.launcher.state.story import story_of
from ms_kungfu.launcher.wire.codec import encode
from tests.browser.pages import Feeder, hostile_events, tile, violations

pytestmark = pytest.mark.browser


class Log:
    """Takes the events of a Feeder."""

    def __init__(self, path):
        self.path, self.events = path, []

    def feed(self, event):
        self.events.append(event)

    def report(self):
        self.path.write_bytes(b"".join(encode(event) + b"\n" for event in self.events))
        write_report([self.path], self.path.with_name("report.html"))
        return self.path.with_name("report.html").as_uri()


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path / e.FILE_NAME)


@pytest.mark.parametrize("width", [1400, 400])
def test_report_opens_from_the_disk_without_any_request(width, log, opened):
    feed = Feeder(log)
    feed.began()
    feed.steps(40)
    feed.killed()
    feed.steps(40, 40)
    for each in (0, 1, 3):
        feed(e.WorkerExited(rank=each - (each > 2), host="10.0.0.1", peer=f"10.0.0.1:{10000 + each}", exit_code=0))
    feed(e.JobEnded(exit_code=0, reason="all workers have finished"), after=2.0)
    url = log.report()
    found = opened(url, width)
    page = found.page
    assert found.requests == [url]
    assert found.errors == []
    assert page.locator("#sentence").inner_text() == story_of(log.events)[-1].text
    assert (
        page.locator("#story li p:last-child").all_inner_texts()
        == [chapter.text for chapter in story_of(log.events)][::-1]
    )
    account = JobAccount()
    for event in log.events:
        account.add(event)
    assert tile(page, "Goodput") == f"{account.goodput:.0%}"
    assert tile(page, "Workers") == "3"
    assert tile(page, "Duration") == "1:22"
    states = page.locator("#ranks tr .state").all_inner_texts()
    assert states == ["exit code 0"] * 3 + ["was killed by SIGKILL"]
    assert page.locator("#ranks tbody th").all_inner_texts() == ["0", "1", "2", "2"]
    assert page.get_by_role("button", name=re.compile("Resize|Stop|Evict")).count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert violations(page) == []


@pytest.mark.parametrize(
    ("code", "reason", "tone"),
    [(130, "interrupted by SIGINT", "done"), (1, "rank 0 exited with 1", "bad"), (0, "all have finished", "done")],
)
def test_job_that_a_user_stopped_has_not_failed(code, reason, tone, log, opened):
    feed = Feeder(log)
    feed.began(2)
    feed.steps(4)
    feed(e.WorkerExited(rank=0, host="10.0.0.1", peer="10.0.0.1:10000", signal=15))
    feed(e.JobEnded(exit_code=code, reason=reason))
    page = opened(log.report()).page
    assert page.locator("#situation").get_attribute("data-tone") == tone
    assert page.locator("#state").get_attribute("data-tone") == ("bad" if tone == "bad" else "good")
    assert page.locator("#ranks tr .state").first.inner_text() == "ended (signal 15)"


def test_report_shows_hostile_events_as_text(log, opened):
    Feeder(log)(*hostile_events())
    found = opened(log.report())
    assert "<script>window.hurt=1</script>" in found.page.locator("#events").inner_text()
    assert found.page.evaluate("[window.hurt, document.querySelectorAll('main img, main script').length]") == [None, 0]
    assert (len(found.requests), found.errors) == (1, [])


def test_report_of_a_job_that_did_not_end_says_so(log, opened):
    feed = Feeder(log)
    feed.began()
    feed.steps(3)
    page = opened(log.report()).page
    assert page.locator("#sentence").inner_text() == "The log ends before the end of the job."
    assert page.locator("#state").inner_text() == "not ended"
