"""Whether a sample number stands for the same content in each process."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from ms_kungfu.dataset import contents, shares
from ms_kungfu.elastic import state_transfer
from ms_kungfu.errors import KungFuError


def of(samples, of_all=False):
    """The contents of a process whose samples these are."""
    numbers = range(len(samples)) if of_all else contents.chosen(len(samples))
    return contents.made_of(len(samples), {n: contents.hash_of([samples[n]]) for n in numbers})


def data(own, total):
    found = shares.Shares(total, batch_size=1)
    found.contents = own
    return found


def test_chosen_samples_follow_from_the_total_and_have_both_ends():
    for total in (1, 2, 40, 1000, 10**9):
        found = contents.chosen(total)
        assert found == sorted(set(found)) == contents.chosen(total)
        assert {0, total - 1} <= set(found)
        assert 0 <= found[0] <= found[-1] < total
        assert len(found) == min(8, total)


@pytest.mark.parametrize(
    "other",
    [[1.0, 2], [np.float32(1), 2], [1.0, "2"], [[1.0], 2], [1.0], [1.0, 2, 3], [np.array([[1.0]]), 2], [{"a": 1.0}, 2]],
    ids=str,
)
def test_hash_of_another_row_is_another_one(other):
    assert contents.hash_of([np.array([1.0]), np.int64(2)]) == contents.hash_of([np.array([1.0]), np.int64(2)])
    assert contents.hash_of([np.array([1.0]), np.int64(2)]) != contents.hash_of(other)


def test_hash_of_what_has_no_bytes_is_refused():
    with pytest.raises(contents.UnstableError, match="has no bytes"):
        contents.hash_of([object()])


def test_some_finds_another_order_and_all_finds_one_other_sample():
    samples = np.arange(96)
    assert contents.differing([of(samples), of(np.random.default_rng(1).permutation(samples))])
    one_off = samples.copy()
    one_off[next(n for n in range(96) if n not in contents.chosen(96))] = 7777
    (found,) = contents.differing([of(samples, True), of(one_off, True)])
    assert one_off[found[0]] == 7777
    assert found[1] == found[0] + 1
    assert not contents.differing([of(samples), of(one_off, True)]), "compared are those that both have hashed"


def test_all_of_many_samples_names_blocks_of_few():
    samples = np.arange(5000)
    other = samples.copy()
    other[3123] = 0
    ((first, last),) = contents.differing([of(samples, True), of(other, True)])
    assert first <= 3123 < last <= first + 5
    assert len(json.dumps(of(samples, True).state())) < 40_000, "it is in each checkpoint"


def test_numbers_are_named_up_to_a_limit():
    assert contents.text_of([(3, 4)]) == "sample 3"
    assert contents.text_of([(3, 4), (8, 12)]) == "samples 3 and 8-11"
    assert contents.text_of([(n, n + 1) for n in range(30)]).endswith("18, 19 and 10 more")


def workers(monkeypatch, everyones):
    """What `compare_contents` says at each worker."""
    words = {r: np.array([c is not None, 0 if c is None else c.word()]) for r, c in enumerate(everyones)}
    states = {r: c.state() for r, c in enumerate(everyones) if c is not None}
    monkeypatch.setattr(state_transfer, "gather_living", lambda row, name: words)
    monkeypatch.setattr(state_transfer, "gather_json", lambda value, name: json.loads(json.dumps(states)))
    for own in everyones:
        dataset = SimpleNamespace(contents=own)
        dataset.leave_out_contents = lambda dataset=dataset: setattr(dataset, "contents", None)
        yield dataset


def test_workers_with_other_contents_are_refused_with_numbers_and_ranks(monkeypatch):
    samples = np.arange(96)
    for dataset in workers(monkeypatch, [of(samples), of(samples[::-1]), of(samples)]):
        with pytest.raises(KungFuError, match=r"samples 0, .* and 95 at rank 0 differ from those at rank 1;.*listing"):
            state_transfer.compare_contents(dataset)


def test_workers_with_the_same_contents_keep_them(monkeypatch):
    for dataset in workers(monkeypatch, [of(np.arange(9)), of(np.arange(9))]):
        state_transfer.compare_contents(dataset)
        assert dataset.contents is not None


def test_no_worker_claims_contents_that_one_could_not_compare(monkeypatch):
    for dataset in workers(monkeypatch, [of(np.arange(9)), None]):
        state_transfer.compare_contents(dataset)
        assert dataset.contents is None


def test_workers_with_different_sample_counts_compare_the_common_samples(monkeypatch):
    for dataset in workers(monkeypatch, [of(np.arange(90)), of(np.arange(90), True)]):
        state_transfer.compare_contents(dataset)


def test_difference_names_the_columns_that_differ():
    def of_columns(paths):
        columns = contents.Columns(["image", "path"])
        for number in contents.chosen(9):
            columns.add([number, paths[number]])
        hashes = {n: contents.hash_of([n, paths[n]]) for n in contents.chosen(9)}
        return contents.restored(json.loads(json.dumps(contents.made_of(9, hashes, columns.hashes()).state())))

    here, there = of_columns([f"/here/{n}" for n in range(9)]), of_columns([f"/there/{n}" for n in range(9)])
    assert contents.difference([here, here]) == ""
    assert contents.difference([here, there]).endswith(' and 8 (column "path")')
    assert contents.difference([here, of(np.arange(9))]).endswith(" and 8"), "of an older checkpoint: no columns"


def test_state_of_other_contents_is_refused_by_number():
    state = json.loads(json.dumps(data(of(np.arange(9)), 9).state()))
    data(of(np.arange(9)), 9).restore(state)
    with pytest.raises(ValueError, match=r"samples 0, .* and 8 of .* differ from the samples that training began with"):
        data(of(np.arange(9)[::-1]), 9).restore(state)


def test_state_without_contents_leaves_them_out():
    before = shares.Shares(8, batch_size=1).state()
    assert "contents" not in before
    found = data(of(np.arange(8)), 8)
    found.restore(before)
    assert found.contents is None
