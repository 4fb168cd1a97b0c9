"""The page of a real job with four workers: a stall, a slow rank, a killed worker and a resize by the page's button."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from ms_kungfu import job_events as e
from ms_kungfu.launcher.explain_command import events_in
from ms_kungfu.launcher.state.account import JobAccount
from ms_kungfu.launcher.state.story import story_of
from tests.browser.pages import shows, sizes, tile

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
PROGRAM = Path(__file__).with_name("programs") / "steps.py"


def test_page_of_a_job_names_causes_and_changes_it(kungfu_run, opened, tmp_path):
    logs = tmp_path / "logs"
    job = kungfu_run("-np", 4, "-w", "-dashboard", "-logdir", logs, sys.executable, PROGRAM, tmp_path)
    url, port = job.wait_for(r"dashboard: url=(http://127\.0\.0\.1:(\d+)/#token=\S+)")[0].groups()
    found, reader = opened(url), opened(f"http://127.0.0.1:{port}/")
    page = found.page
    pids = {int(match[1]): int(match[2]) for match in job.wait_for(r"^in version 0 rank (\d) pid (\d+)", 4)}
    shows(page, "#sentence", "^4 workers train. No rank keeps others waiting.$")

    (tmp_path / "stands").touch()
    shows(page, "#sentence", r"^Rank 1 is evaluating: ranks 0, 2 and 3 wait for it, for \d+ s now.$")
    shows(page, "#ranks tr.late", rf"^1127.0.0.1{pids[1]}")
    shows(page, "#ranks tr:first-child .state", "waiting for rank 1")
    (tmp_path / "stands").unlink()
    shows(page, "#story li.stall", "Ranks 0, 2 and 3 wait for rank 1.* That lasted for about")

    (tmp_path / "slow").touch()
    shows(page, "#sentence", "^Rank 2 is slow: ranks 0, 1 and 3 ")
    (tmp_path / "slow").unlink()

    os.kill(pids[3], signal.SIGKILL)
    shows(page, "#story li.failure", "Rank 3 on 127.0.0.1 was killed by SIGKILL")
    shows(page, "#tiles dd", "^3$")

    assert reader.page.get_by_role("button", name=re.compile("Resize|Stop|Evict")).count() == 0
    status = """async () => (await fetch("resize", {
        method: "POST", body: '{"workers": 1}', headers: {"Content-Type": "application/json"}})).status"""
    assert reader.page.evaluate(status) == 401
    page.get_by_role("button", name="Resize…").click()
    page.locator("#dialog-workers").fill("4")
    page.get_by_role("button", name="Resize", exact=True).click()
    page.locator("#dialog").wait_for(state="hidden")
    job.wait_for(r"^in version 2 rank \d pid", 4)
    shows(page, "#changes .tag", "^3 → 4 workers, after step")

    job.signal(signal.SIGUSR1)
    job.assert_exit(0)
    shows(page, "#sentence", "^The job ended with exit code 0 after step")
    events, _ = events_in((logs / e.FILE_NAME).read_bytes().splitlines())
    account = JobAccount()
    for event in events:
        account.add(event)
    report = opened((logs / "report.html").as_uri())
    for shown in (page, reader.page, report.page):
        assert sizes(shown) == [size for _, size in account.sizes] == [4, 3, 4]
        assert tile(shown, "Goodput") == f"{account.goodput:.0%}"
        assert tile(shown, "Step").replace(",", "") == str(account.steps)
        assert tile(shown, "Failures") == "1"
        texts = shown.locator("#story li p:last-child").all_inner_texts()
        assert texts[::-1] == [each.text for each in story_of(events)]
    summary = "\n".join(line for line in job.lines if "summary: " in line)
    assert f"goodput={tile(page, 'Goodput')} " in summary
    assert json.loads(report.page.locator("#data").text_content())[-1]["event"] == "job_ended"
    assert report.requests == [(logs / "report.html").as_uri()]
    assert found.errors + report.errors == []
