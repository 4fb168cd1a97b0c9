"""The live page in a browser, over a server whose job is the test: what it shows, and what it does on a click."""

from __future__ import annotations

import re

import pytest

from ms_kungfu import job_events as e
from ms_kungfu.launcher.dashboard.requests import Evict, Resize, Stop
from tests.browser.pages import HOSTILE, WAIT_MS, Feeder, hostile_events, rank, shows, sizes, tile, violations
from tests.fed_dashboard import FedDashboard, status

pytestmark = pytest.mark.browser


@pytest.fixture
def fed():
    with FedDashboard() as dashboard:
        yield dashboard


@pytest.fixture
def feed(fed):
    return Feeder(fed)


def test_sizes_failure_and_goodput_are_those_of_the_account(fed, feed, opened):
    feed.began()
    feed.steps(10)
    feed.killed()
    feed.steps(10, 10)
    found = opened(fed.server.url)
    page = found.page
    shows(page, "#tiles dd", "^3$")
    assert tile(page, "Goodput") == f"{feed.account.goodput:.0%}"
    assert tile(page, "Step") == "100"
    assert tile(page, "Failures") == str(feed.account.failures) == "1"
    assert sizes(page) == [size for _, size in feed.account.sizes] == [4, 3]
    shows(page, "#changes li", "worker 2 was killed by SIGKILL")
    shows(
        page,
        "#story li.failure",
        "Rank 2 on 10.0.0.1 was killed by SIGKILL. .* took 0.25 s longer than usual.* Ranks 0, 1 and 3 waited",
    )
    shows(page, "#chart-workers .hidden", "3 workers at last, between 3 workers and 4 workers")
    assert "0:10: rank 2 was killed by SIGKILL" in page.locator("#chart-workers figcaption").text_content()
    assert "loss" not in page.locator("#chart-loss figcaption").text_content()
    assert found.errors == []


CAUSES = {
    "frozen": (rank(1, "unknown", operation="stopped by a signal"), "is stopped by a signal"),
    "data": (rank(1, "data", seconds=12.0), "is loading data"),
    "evaluation": (rank(1, "computing", operation="evaluation"), "is evaluating"),
    "compilation": (rank(1, "compiling", operation="compilation"), "is compiling"),
    "checkpoint": (rank(1, "checkpoint"), "is writing a checkpoint"),
    "failed": (rank(1, "failed", operation="it has failed"), "has failed (it has failed)"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_sentence_names_the_rank_and_its_cause(cause, fed, feed, opened):
    feed.began()
    feed.steps(10)
    late, does = CAUSES[cause]
    sentence = f"Rank 1 {does}: ranks 0, 2 and 3 wait for it, for 12 s now."
    found = opened(fed.server.url)
    waiting = [rank(each, "waiting", waits_for=[1], seconds=12.0, operation="all_reduce") for each in (0, 2, 3)]
    feed.sample(waiting[0], late, *waiting[1:])
    shows(found.page, "#sentence", f"^{re.escape(sentence)}$")
    shows(found.page, "#detail", "Rank 1: 10.0.0.1, pid 4001, step 50. The others wait in all_reduce.")
    shows(found.page, "#ranks tr.late th", "^1")
    shows(found.page, "#ranks tr:first-child .state", "waiting for rank 1, 12 s")
    assert found.page.locator("#ranks tr.late").count() == 1


def test_stalled_job_shows_no_speed_and_no_green(fed, feed, opened):
    feed.began(2)
    feed.steps(10)
    page = opened(fed.server.url).page
    feed.sample(rank(0, "computing"), rank(1, "computing"))
    shows(page, "#tiles div:nth-child(3) dd:nth-child(2)", "^160$")
    shows(page, "#state[data-tone=good]", "running")
    feed.now += 30
    late = rank(1, "unknown", operation="stopped by a signal")
    feed.sample(rank(0, "waiting", waits_for=[1], seconds=30.0, operation="all_reduce"), late)
    shows(page, "#tiles div:nth-child(3) dd:nth-child(2)", "^0$")
    shows(page, "#state[data-tone=wait]", "running")


@pytest.mark.parametrize(
    ("waits", "sentence"),
    [
        ([[3], [], [3], [1]], "Rank 1 is computing: ranks 0, 2 and 3 wait for it, for 12 s now."),
        ([[1], [0], [], []], "Ranks 0 and 1 wait for each other, for 12 s now."),
    ],
)
def test_sentence_follows_the_chain_of_waits(waits, sentence, fed, feed, opened):
    feed.began()
    feed.steps(10)
    page = opened(fed.server.url).page
    feed.sample(
        *(rank(number, "waiting" if each else "computing", waits_for=each, seconds=12.0)
          for number, each in enumerate(waits))
    )  # fmt: skip
    shows(page, "#sentence", f"^{re.escape(sentence)}$")


def test_slow_rank_that_ends_steps_is_called_slow(fed, feed, opened):
    feed.began()
    feed.steps(10)
    page = opened(fed.server.url).page
    for step in range(50, 53):
        feed.sample(rank(0, "waiting", step=step, waits_for=[1], seconds=8.0), rank(1, "data", step=step))
        shows(page, "#ranks td.step", f"^{step}$")
    shows(
        page,
        "#sentence",
        "^Rank 1 is slow: rank 0 waits for it in each step, for 8 s now. It is loading data most of the time.$",
    )


def test_stall_without_samples_is_named_by_the_event(fed, feed, opened):
    feed.began()
    feed.steps(3)
    feed(e.StallBegan(rank=1, step=15, waiting=[0, 2, 3], seconds=2.0, reason="stopped by a signal"))
    page = opened(fed.server.url).page
    shows(page, "#sentence", "^Rank 1 is stopped by a signal: ranks 0, 2 and 3 wait for it, for 2 s now.$")
    shows(page, "#story li.stall", "It is stopped by a signal. It has not reached the operation yet.$")
    feed(e.StallEnded(rank=1, seconds=3.0), after=1.0)
    feed.steps(1, 3)
    shows(page, "#sentence", "^4 workers train. No rank keeps others waiting.$")


def test_progress_has_the_total_and_the_time_left(fed, feed, opened):
    feed.began()
    feed.steps(1, total_steps=950)
    feed.steps(9, 1)
    page = opened(fed.server.url).page
    shows(page, "#tiles dd.note", "^of 950, 3:00 left$")


def test_full_disk_is_named(fed, feed, opened):
    feed.began()
    feed.steps(3)
    feed(e.CheckpointFailed(rank=0, step=15, reason="No space left on device"))
    page = opened(fed.server.url).page
    shows(page, "#sentence", "^Checkpoints fail: No space left on device. Training continues.$")
    feed(e.CheckpointWritten(rank=0, step=20, path="/c", seconds=0.1))
    shows(page, "#sentence", "^4 workers train")


def test_hostile_events_are_shown_as_text(fed, feed, opened):
    feed(*hostile_events())
    fed.current["why"] = fed.current["state"] = HOSTILE
    found = opened(fed.server.url)
    bad = rank(0, HOSTILE, host=HOSTILE, operation=HOSTILE, waits_for=[1])
    feed.sample(bad, rank(1, "__proto__"))
    shows(found.page, "#events td", re.escape("<script>window.hurt=1</script>"))
    shows(found.page, "#ranks td", re.escape("onerror="))
    assert found.page.evaluate("[window.hurt, document.querySelectorAll('main img, main script').length]") == [None, 0]
    assert found.errors == []


def test_page_stays_smooth_with_64_ranks_and_20000_events(fed, feed, opened):
    """The median drawing takes less than the half second between two of them."""
    feed.began(64)
    for number in range(18_000):
        feed(e.Statistics(step=number, steps=1, samples=64, seconds=1.0, loss=1.0, committed=0.9, p50=0.1), after=1.0)
        if number % 64 == 0:
            parts = {name: [0.2] * 64 for name in ("p50", "p99", "computing", "waiting", "data", "checkpoint")}
            feed(e.RankStatistics(seconds=64.0, **parts))
        if number % 10 == 0:
            feed(e.StepDelayed(rank=number % 64, step=number, seconds=2.5))
    fed.current = status(64)
    states = ("computing", "waiting", "reducing")
    for second in range(600):
        feed.sample(*(rank(each, states[(each + second) % 3]) for each in range(64)))
        feed.now += 1.0
    found = opened(fed.server.url)
    shows(found.page, "#tiles dd", "^64$")
    shows(found.page, "#events-note", "of 1,")
    shows(found.page, "#lanes-note", "10 minutes")
    drawn = found.page.evaluate("""() => {
        const times = [];
        for (let turn = 0; turn < 5; turn += 1) {
            const began = performance.now();
            kungfu.draw();
            document.body.offsetHeight;
            times.push(performance.now() - began);
        }
        return times.sort((one, other) => one - other)[2];
    }""")
    assert drawn < 500, drawn
    assert found.page.evaluate("document.querySelectorAll('*').length") < 10_000
    assert found.errors == []


def test_page_that_loses_its_server_says_so_and_continues(opened):
    with FedDashboard() as fed:
        feed = Feeder(fed)
        feed.began()
        feed.steps(3)
        page = opened(fed.server.url).page
        shows(page, "#sentence", "^4 workers train")
        port = fed.server.port
    shows(page, "#sentence", "^The page has no connection to the launcher. It tries again.$")
    with FedDashboard(port=port, first_event=1000) as fed:
        feed = Feeder(fed)
        feed.began(2)
        feed.steps(5)
        shows(page, "#sentence", "^2 workers train")
        assert tile(page, "Step") == "25"
        assert page.locator("#events-note").inner_text() == "4 of 4"


# ---- actions ----


def test_page_without_a_token_has_no_buttons(fed, feed, opened):
    feed.began()
    page = opened(fed.server.url).page
    feed.sample(*map(rank, range(4)))
    shows(page, "#ranks td", "computing")
    assert page.get_by_role("button", name=re.compile("Resize|Stop|Evict")).count() == 0
    answer = page.evaluate("""async () => (await fetch("resize", {method: "POST", body: '{"workers":1}',
        headers: {"Content-Type": "application/json", "Authorization": "Bearer x"}})).status""")
    assert answer == 401
    assert fed.commands == []


def test_buttons_send_commands_after_confirmation(fed, feed, opened):
    feed.began()
    found = opened(f"{fed.server.url}#token={fed.token}")
    page = found.page
    feed.sample(*map(rank, range(4)))
    assert fed.token not in page.url
    page.get_by_role("button", name="Resize…").click()
    assert page.evaluate("document.activeElement.id") == "dialog-workers"
    page.locator("#dialog-workers").fill("6")
    page.get_by_role("button", name="Cancel").click()
    assert fed.commands == []
    page.get_by_role("button", name="Resize…").click()
    page.locator("#dialog-workers").fill("6")
    page.locator("#dialog-workers").press("Enter")
    shows(page, "#detail", "Accepted by the test.")
    page.get_by_role("button", name="Evict rank 2…").click()
    shows(page, "#dialog-text", "on 10.0.0.1 as process 4002")
    feed.sample(rank(0), *(rank(each, pid=4001 + each, peer=f"10.0.0.1:{10001 + each}") for each in range(1, 3)))
    shows(page, "#ranks tr:nth-child(2) td", "4002")  # ranks shift while the dialog is open
    page.get_by_role("button", name="Evict rank 2", exact=True).click()
    page.locator("#dialog").wait_for(state="hidden")
    page.get_by_role("button", name="Stop…").click()
    page.get_by_role("button", name="Stop the job").click()
    page.locator("#dialog").wait_for(state="hidden")
    assert fed.commands == [Resize(6), Evict(2, "10.0.0.1:10002"), Stop()]
    assert fed.token not in page.content()
    assert found.errors == []


def test_refused_command_is_explained_in_the_dialog(fed, feed, opened):
    feed.began()
    page = opened(f"{fed.server.url}#token={fed.token}").page
    feed.sample(*map(rank, range(4)))
    page.get_by_role("button", name="Resize…").click()
    page.locator("#dialog-workers").fill("0")
    page.get_by_role("button", name="Resize", exact=True).click()
    shows(page, "#dialog-error", "at least 1")
    fed.refusal = "the job runs without -w"
    page.locator("#dialog-workers").fill("3")
    page.get_by_role("button", name="Resize", exact=True).click()
    shows(page, "#dialog-error", "^the job runs without -w$")
    assert fed.commands == []


def test_job_that_does_not_change_has_no_resize_button(fed, feed, opened):
    feed.began()
    fed.current["follows_changes"] = False
    page = opened(f"{fed.server.url}#token={fed.token}").page
    feed.sample(*map(rank, range(4)))
    shows(page, "#ranks td", "computing")
    assert page.get_by_role("button", name=re.compile("Resize|Stop|Evict")).all_inner_texts() == ["Stop…"]


# ---- filters, keyboard, accessibility ----


def test_filters_choose_the_events(fed, feed, opened):
    feed.began()
    feed(
        e.WorkerFailed(rank=2, reason="was killed by SIGKILL"),
        e.RuntimeMessage(rank=1, reason="needle"),
        e.Evaluated(rank=0, seconds=1.0),
    )
    page = opened(fed.server.url).page
    names = page.locator("#events tbody td:nth-child(2)").all_inner_texts
    shows(page, "#events-note", "^9 of 9$")
    page.get_by_label("Search").fill("NEEDLE")
    shows(page, "#events-note", "^1 of 9$")
    assert names() == ["runtime message"]
    page.get_by_label("Search").fill("")
    page.locator("#rank").select_option("2")
    shows(page, "#events-note", "^2 of 9$")
    assert names() == ["worker failed", "worker started"]
    page.get_by_role("checkbox", name="Workers").uncheck()
    shows(page, "#events-note", "^1 of 9$")
    page.get_by_role("checkbox", name="Failures").uncheck()
    shows(page, "#no-events", "No event matches the filters.")


def test_keyboard_reaches_everything_and_focus_survives_updates(fed, feed, opened):
    feed.began()
    feed.steps(3)
    page = opened(f"{fed.server.url}#token={fed.token}").page
    feed.sample(*map(rank, range(4)))
    shows(page, "#ranks td", "computing")
    reached = []
    page.locator("body").press("Tab")
    for _ in range(60):
        reached.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()"))
        if page.evaluate("document.activeElement.id") == "search":
            break
        page.keyboard.press("Tab")
    for wanted in ("Skip to the job", "Resize…", "Stop…", "Evict rank 0…", "Evict rank 3…"):
        assert wanted in reached, reached
    assert page.evaluate("document.activeElement.id") == "search", reached
    page.get_by_role("button", name="Evict rank 1…").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    feed.steps(1, 3)
    feed.sample(*(rank(each, "waiting", waits_for=[(each + 1) % 4]) for each in range(4)))
    shows(page, "#ranks td", "waiting for rank 1")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Evict rank 1…"
    page.keyboard.press("Enter")
    for _ in range(6):  # the dialog keeps the focus
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body || document.activeElement.closest('dialog') !== null"
        )
    page.keyboard.press("Escape")
    assert page.locator("#dialog").is_hidden()
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Evict rank 1…"
    page.locator("#chart-loss").focus()
    page.keyboard.press("ArrowLeft")
    shows(page, "#chart-loss .readout", "^0:0[34]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_page_has_no_accessibility_violation_and_fits(width, scheme, fed, feed, opened):
    feed.began()
    feed.steps(10)
    feed.killed()
    feed(e.StallBegan(rank=1, waiting=[0, 2], seconds=2.0, reason="stopped by a signal"))
    page = opened(f"{fed.server.url}#token={fed.token}", width, scheme).page
    feed.sample(rank(0, "waiting", waits_for=[1], seconds=12.0), rank(1, "unknown"), rank(2, "waiting", waits_for=[1]))
    shows(page, "#sentence", "^Rank 1 is stopped by a signal")
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.get_by_role("button", name="Stop…").click()
    assert violations(page) == []


def test_page_that_has_not_connected_yet_connects(fed, opened):
    """Before the first message, the page shows nothing but that it connects."""
    page = opened("about:blank").page
    page.add_init_script("globalThis.EventSource = class { addEventListener() {} };")
    page.goto(fed.server.url)
    shows(page, "#sentence", "^The page connects to the launcher.$")
    assert page.locator("#connection").inner_text() == "connecting"
    shown = "(all) => all.filter((each) => getComputedStyle(each).display !== 'none').map((each) => each.id)"
    assert page.locator("main > *").evaluate_all(shown) == ["situation", "spoken"]
    assert page.locator("#state").is_hidden()
    assert "passes no loss" not in page.content()
    assert "isn't known" not in page.content()


def test_page_without_events_has_empty_states(fed, opened):
    found = opened(fed.server.url)
    shows(found.page, "#sentence", "^The job is starting.$")
    for text in ("No worker has started yet.", "No step has ended yet.", "No event yet.", "Nothing has happened yet."):
        found.page.get_by_text(text).first.wait_for(timeout=WAIT_MS)
    for place in ("#changes", "#story"):
        empty = found.page.locator(f"{place} .empty")
        assert empty.evaluate("(item) => item.scrollHeight < 45"), "the text is on one line"
    assert found.errors == []
