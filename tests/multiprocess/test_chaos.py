"""What ms_kungfu.chaos makes of programs that it can't judge."""

import pytest

from tests.conftest import long

pytestmark = pytest.mark.timeout(90)


@pytest.mark.parametrize(
    ("seconds", "every", "told"),
    [
        long(1000, 1, "no worker followed a change"),
        (0, 1000, "the job ended before any action"),  # however long the job takes to start
    ],
)
def test_a_program_without_workers_is_not_well(start_module, script, seconds, every, told):
    # Ends once it has been killed and started again, or resized, so often that a change was wanted.
    text = f"""
import os, sys, time
deadline = time.monotonic() + {seconds}
while time.monotonic() < deadline and int(os.environ["KUNGFU_INCARNATION"]) < 1:
    time.sleep(0.05)
"""
    chaos = start_module(
        "ms_kungfu.chaos", "-seed", 1, "-for", 20, "-every", every, "-resize", "3:3", "-finish", 5, "--", "-np", 2,
        *script(text),
    )  # fmt: skip
    assert chaos.wait(60) == 1
    assert f"chaos: WRONG: {told}" in chaos.output
    assert "no problems" not in chaos.output
