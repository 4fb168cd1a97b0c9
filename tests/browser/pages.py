"""What the tests of the live page share: a job's events, and what the page shows."""

from __future__ import annotations

import re

import pytest

from ms_kungfu import job_events as e
from ms_kungfu.launcher.state.account import JobAccount

BEGAN = 1_790_000_000.0
WAIT_MS = 20_000


class Feeder:
    """Emits events at times of its own, and keeps the account of the launcher."""

    def __init__(self, fed):
        self.fed, self.now, self.account = fed, BEGAN, JobAccount()

    def __call__(self, *events, after=0.0):
        self.now += after
        for event in events:
            event.time = round(self.now, 3)
            self.account.add(event)
            self.fed.feed(event)

    def began(self, workers=4):
        self(
            e.LogBegan(version=1, job="digits", ms_kungfu="0"),
            e.JobStarted(workers=workers, hosts=["10.0.0.1"], command="python train.py"),
        )
        for rank in range(workers):
            self(e.WorkerStarted(rank=rank, host="10.0.0.1", pid=4000 + rank, peer=f"10.0.0.1:{10000 + rank}"))

    def steps(self, count, step=0, **more):
        for number in range(1, count + 1):
            values = {
                "seconds": 1.0,
                "steps": 5,
                "samples": 160,
                "loss": 2.0 / (step + number),
                "committed": 0.9,
                "p50": 0.2,
                **more,
            }
            self(e.Statistics(step=5 * (step + number), learning_rate=0.1, **values), after=1.0)

    def killed(self):
        """Emit the failure of rank 2, and what follows."""
        reason = "was killed by SIGKILL"
        self(
            e.WorkerFailed(rank=2, host="10.0.0.1", pid=4002, peer="10.0.0.1:10002", signal=9, decision="shrink",
                           reason=reason, step=50),
            e.ResizeRequested(version=1, workers=3, workers_before=4, by="controller", reason=f"worker 2 {reason}"),
            e.FailureSeen(rank=2, step=51, seconds=0.25, survivors=[0, 1, 3]),
            e.VersionCommitted(version=1, workers=3, workers_before=4, seconds=0.5, step=51),
        )  # fmt: skip

    def sample(self, *ranks):
        self.fed.sample(self.now, list(ranks))


def rank(number, state="computing", **more):
    return {
        "rank": number, "peer": f"10.0.0.1:{10000 + number}", "host": "10.0.0.1", "pid": 4000 + number,
        "memory": 300 << 20, "step": 50, "state": state, "operation": None, "waits_for": [], "seconds": 0.5, **more,
    }  # fmt: skip


def shows(page, selector, text):
    """Wait until an element has this text (a regular expression)."""
    page.locator(selector, has_text=re.compile(text)).first.wait_for(timeout=WAIT_MS)


def tile(page, name):
    return page.locator("#tiles div", has=page.get_by_text(name, exact=True)).locator("dd").first.inner_text()


def sizes(page):
    """Return the sizes in the page's list, from the first one on."""
    return [int(re.search(r"(\d+) workers?", text)[1]) for text in page.locator("#changes .tag").all_inner_texts()][
        ::-1
    ]


def violations(page):
    """Return what axe finds: contrast, names, roles, focus."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install ms-kungfu[browser]")
    return [(each["id"], each["nodes"][0]["html"][:200]) for each in axe.Axe().run(page).response["violations"]]


HOSTILE = "<img src=x onerror='window.hurt=1'><script>window.hurt=1</script>\u2028\"'&`${window.hurt=1}javascript:"


def hostile_events():
    yield e.LogBegan(version=1, job=HOSTILE, ms_kungfu=HOSTILE)
    yield e.JobStarted(workers=2, hosts=[HOSTILE], command=HOSTILE)
    yield e.WorkerStarted(rank=0, host=HOSTILE, pid=1, peer=HOSTILE)
    yield e.WorkerFailed(rank=1, host=HOSTILE, peer=HOSTILE, reason=HOSTILE)
    yield e.ResizeRequested(version=1, workers=3, workers_before=2, by="client", reason=HOSTILE)
    yield e.VersionCommitted(version=1, workers=3, workers_before=2, seconds=0.5, reason=HOSTILE)
    yield e.PolicyDecided(step=1, changes=HOSTILE, reason=HOSTILE)
    yield e.CheckpointFailed(rank=0, step=1, reason=HOSTILE)
    yield e.StallBegan(rank=0, waiting=[1], seconds=2.0, reason=HOSTILE)
    yield e.Statistics(step=1, steps=1, seconds=1.0, loss="nan")
