"""The model of an all-reduce over many hosts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.simulate import DEFAULT, UNHIDDEN_REDUCTION, Measurement, Network, errors, fit

NETWORK = Network(base_s=40e-6, step_s=25e-6, byte_s=8e-9, work_s=0.5e-9)
SIZES = (4, 4096, 65536, 1 << 18, 1 << 20, 1 << 24)


def measured(network, hosts, noise=lambda number: 1.0):
    pairs = [(n, size) for n in hosts for size in SIZES]
    return [Measurement(n, s, network.seconds(n, s) * noise(i)) for i, (n, s) in enumerate(pairs)]


def test_simulation_counts_the_steps_and_bytes_of_the_runtime():
    only = {name: Network(*(float(name == other) for other in ("base", "step", "byte", "work"))).seconds
            for name in ("base", "step", "byte", "work")}  # fmt: skip
    assert [only["step"](n, 1000, False) for n in (2, 3, 4, 5, 8, 1024)] == [1, 3, 2, 4, 3, 10]
    assert [only["byte"](n, 1000, False) / 1000 for n in (2, 3, 4)] == [1, 3, 2]
    assert [only["step"](n, 1000, True) for n in (2, 3, 1024)] == [2, 4, 2046]
    assert only["byte"](4, 1000, True) == 1500
    assert only["base"](1024, 4) == 1
    assert only["work"](1024, 12345) == 12345


# HostsAuto.ChangesOverByWhatWasMeasuredAndByTheNumberOfHosts has the runtime's.
def test_simulation_changes_algorithm_at_the_size_of_the_runtime():
    source = Path(__file__).parents[2] / "ops_src/collectives/hosts/selector.cc"
    found = re.search(r"kUnhiddenReduction = (\d+);", source.read_text())
    assert found is not None
    assert int(found[1]) == UNHIDDEN_REDUCTION
    assert [DEFAULT.takes_ring(2, nbytes) for nbytes in (124_999, 125_001)] == [False, True]
    assert [DEFAULT.takes_ring(1024, nbytes) for nbytes in (2_700_000, 2_900_000)] == [False, True]
    assert not DEFAULT.takes_ring(1, 1 << 30)


def test_a_network_is_found_in_what_it_took_and_foretells_more_hosts():
    found = fit(measured(NETWORK, (2, 3, 4)))
    for name, value in vars(NETWORK).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name
    noisy = fit(measured(NETWORK, (2, 3, 4), lambda number: 1.05 if number % 2 else 0.95))
    assert max(map(abs, errors(noisy, measured(NETWORK, (8,))))) < 0.15


def test_no_number_is_below_nothing():
    found = fit(measured(Network(0, 25e-6, 8e-9, 0), (2, 4), lambda number: 1 + 0.1 * (number % 3 - 1)))
    assert min(vars(found).values()) >= 0


@pytest.mark.parametrize("few", [[], measured(NETWORK, (2,)), measured(NETWORK, (2, 4))[:2]])
def test_too_few_measurements_are_refused(few):
    with pytest.raises(ValueError, match="two numbers of hosts"):
        fit(few)


def test_the_command_foretells_from_a_file_and_refuses_what_is_none(tmp_path, capsys):
    file, written = tmp_path / "measured.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"hosts": m.hosts, "nbytes": m.nbytes, "seconds": m.seconds}) for m in measured(NETWORK, (2, 3, 4))
    ]
    file.write_text("\n".join(lines))
    words = ["simulate", "--hosts", "1024", "--sizes", "4,16M", "--measured", str(file), "--json", str(written)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "fitted to 18 measurements: off by 0%" in printed
    assert "4 hosts, foretold from fewer:" in printed
    found = [json.loads(line) for line in written.read_text().splitlines()]
    assert [one["seconds"] for one in found] == pytest.approx([NETWORK.seconds(1024, n) for n in (4, 16 << 20)])
    assert [one["algorithm"] for one in found] == ["doubling", "ring"]
    for text in ("{}", "no json", '{"hosts": 1, "nbytes": 4, "seconds": 1}', '{"hosts": 2, "nbytes": 4, "seconds": 0}'):
        file.write_text(text)
        assert main(words) == 1
        assert "is no measurement" in capsys.readouterr().err


def test_a_faster_cable_is_asked_for_by_its_rate(capsys):
    def foretold(megabits):
        assert main(["simulate", "--hosts", "2", "--sizes", "256M", "--megabits", megabits]) == 0
        return float(capsys.readouterr().out.splitlines()[-1].split()[3])

    assert foretold("100") > 5 * foretold("1000")


@pytest.mark.parametrize("hosts", ["1", "0", "x"])
def test_fewer_than_two_hosts_are_none(hosts):
    with pytest.raises(SystemExit):
        main(["simulate", "--hosts", hosts])
