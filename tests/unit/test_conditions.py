"""What the bits of a training with shards depend on: how it is told apart, and that it goes on record."""

from __future__ import annotations

import json

from ms_kungfu import _core
from ms_kungfu.dataset import audit, conditions, ledger
from ms_kungfu.dataset.sharding import EpochCursor
from ms_kungfu.elastic.determinism_probe import unequal
from tests.unit.test_ledger import fake_runtime  # noqa: F401  # a fixture

HERE = {"mindspore": "2.10.0", "isa": "AVX2", "cores": 1, "shards": 8}
COMMON = {"global_batch": 24, "drop_remainder": False, "total": 96, "seed": 3, "shuffle": True, "version": 0, "size": 1}
COMMON.update(participants=[0], shards=8, sums=1, weights=[])


def recorded(folder, found):
    """A ledger of one step under these conditions."""
    book = ledger.Ledger(folder, 0, sharded=True, conditions=lambda: found)
    book.step(0, EpochCursor(96).take(24, [0]), 0, [(0, 24)], COMMON)
    return book


def test_numeric_environments_are_distinguished():
    assert conditions.differences(HERE, dict(HERE)) == ""
    other = {**HERE, "isa": "AVX", "more": 1}
    assert conditions.differences(HERE, other) == "instruction set AVX2 there and AVX here"
    assert unequal({0: HERE, 1: HERE}) is None
    assert unequal({0: HERE, 2: HERE, 3: other}) == (
        "the workers' numeric environments differ: instruction set AVX2 at rank 0 and AVX at rank 3"
    )


def test_without_onednn_the_runtimes_own_instruction_set_counts(tmp_path):
    assert conditions.instruction_set(tmp_path) == _core.instruction_set()
    (tmp_path / "libdnnl.so.9").write_text("no library")
    conditions.instruction_set.cache_clear()
    assert conditions.instruction_set(tmp_path) == _core.instruction_set()


def test_ledger_header_has_numeric_environment_and_older_reader_ignores_it(tmp_path):
    recorded(tmp_path, HERE)
    (header,) = ledger.headers(tmp_path)
    assert header["conditions"] == HERE
    assert header["ledger"] == 3
    assert audit.audit(*audit.read(tmp_path)).exact


def test_header_fits_the_longest_numeric_environment_and_reason(tmp_path):
    longest = {**HERE, "cpu": "x" * conditions._CPU_CHARS, "isa": "AVX512_CORE_AMX_FP16", "ms_kungfu": "10.10.10.dev10"}
    longest.update(numpy="1.26.4", cores=1024, shards=1 << 20, global_batch=1 << 30, seed=1 << 62)
    book = recorded(tmp_path, longest)
    place = {"epoch": 1 << 30, "step": 1 << 30, "rank": 9999, "version": 1 << 40}
    header = book._header({**place, "reason": "\u00fc" * ledger._REASON_CHARS, "goes_on": True})
    assert len(header) == ledger._HEADER_BYTES
    assert json.loads(header)["conditions"] == longest
