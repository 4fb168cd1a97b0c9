"""The pure parts of ms_kungfu.chaos and of the bench of pauses."""

from __future__ import annotations

import pytest

from benchmarks.pauses import Moment, analyse, summary
from ms_kungfu.tools.chaos import Sample, launcher_leaks, leaks, settled

MIB = 1 << 20


def samples(memory_mib, descriptors, mappings):
    return [Sample(m * MIB, d, s) for m, d, s in zip(memory_mib, descriptors, mappings)]


def test_constant_usage_is_no_leak():
    assert leaks(samples([300 + i % 7 for i in range(100)], [12 + i % 3 for i in range(100)], [1] * 100)) == []


def test_growth_is_named():
    grown = leaks(samples(range(100, 900, 8), range(10, 110), range(1, 101)))
    assert len(grown) == 3
    assert grown[0].startswith("memory grew from ")
    assert grown[1] == "descriptors grew from 59 to 109"
    assert grown[2] == "shared mappings grew from 50 to 100"


def test_growth_at_the_start_and_short_lived_processes_are_no_leak():
    lived = samples([50] * 40 + [900] * 60, [3] * 40 + [20] * 60, [0] * 40 + [9] * 60)
    assert len(leaks(lived[:80])) == 3
    assert settled(lived, 20.0) == lived[40:]
    assert leaks(settled(lived, 20.0)) == []
    assert settled(lived[:79], 20.0) == []


def test_the_launcher_is_judged_at_equal_numbers_of_workers():
    def launcher(each):  # 40 looks with 2 workers, 40 with 4, and so on; `each` descriptors more each time
        held = [10 + 3 * size + each * turn for turn in range(4) for size in (2, 4) for _ in range(40)]
        held[75] += 50  # a moment
        return list(zip(([2] * 40 + [4] * 40) * 4, samples([90] * len(held), held, [2] * len(held))))

    assert launcher_leaks(launcher(0)) == []
    assert launcher_leaks(launcher(3)) == [
        "with 2 workers, descriptors grew from 17.5 to 23.5",
        "with 4 workers, descriptors grew from 25 to 29.5",
    ]


def test_a_pause_is_what_the_affected_step_takes_longer_than_the_median():
    # Two survivors with steps of 10 ms; at 1.005 s a worker dies, and the change follows in the step after.
    def rows(redo, adoption):
        times = [(0.9 + i / 100, 0.91 + i / 100) for i in range(10)]
        times += [(1.0, 1.01 + redo), (1.01 + redo, 1.02 + redo + adoption)]
        end = times[-1][1]
        times += [(end + i / 100, end + (i + 1) / 100) for i in range(20)]
        return [(i, b, e - 0.002, e) for i, (b, e) in enumerate(times)], end

    first, first_end = rows(0.03, 0.005)
    second, second_end = rows(0.02, 0.016)
    found = analyse(
        [Moment(1.005, (7, 8))],
        {7: first, 8: second, 9: first[:10]},
        {7: [0.8, first_end, first_end + 0.05], 8: [0.8, second_end, second_end + 0.05]},
        [1.017],
    )
    assert found.median_step == pytest.approx(0.01)
    assert found.parts == {
        "whole": [pytest.approx(0.03)],
        "redo": [pytest.approx(0.03)],
        "adoption": [pytest.approx(0.016)],
        "joining": [pytest.approx(0.0, abs=1e-9)],
        "heard": [pytest.approx(0.012)],
        "woken": [pytest.approx(1.038 - 1.017)],
    }


def test_percentiles_are_values_that_occurred():
    values = [float(i) for i in range(1, 201)]
    assert summary(values) == {"p50": 100.0, "p99": 198.0, "max": 200.0}
    assert summary([5.0]) == {"p50": 5.0, "p99": 5.0, "max": 5.0}
