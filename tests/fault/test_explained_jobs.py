"""`kungfu-run explain` of simulated jobs: what the script did is in the story, and no more."""

from __future__ import annotations

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from tests.fault.stories import SCRIPTS, check, drawn


@pytest.mark.parametrize("name", SCRIPTS)
def test_story_of_a_job_is_the_scripts(name: str) -> None:
    check(SCRIPTS[name])


@pytest.mark.parametrize("seed", range(24))
def test_story_of_a_drawn_job_is_the_scripts(seed: int) -> None:
    check(drawn(seed))
