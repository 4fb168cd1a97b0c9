"""Fusion groups: the configuration and the plan."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from ms_kungfu.fusion import Gradient, Mode, configured, make_plan, parse
from ms_kungfu.fusion.mode import MB, for_overlap
from ms_kungfu.fusion.shapes import GRADIENTS


def gradients(*sizes_mb, ids=None, dtypes=None):
    ids, dtypes = ids or [1] * len(sizes_mb), dtypes or ["float32"] * len(sizes_mb)
    return [Gradient(f"p{i}", int(s * MB), d, f) for i, (s, d, f) in enumerate(zip(sizes_mb, dtypes, ids))]


def members(gradients, fusion="auto"):
    return [list(group.members) for group in make_plan(gradients, parse(fusion)).groups]


def size(mb):
    return {"mode": "size", "config": mb}


def index(*points):
    return {"mode": "index", "config": list(points)}


def model(name):
    return [Gradient(str(i), 4 * n, "float32") for i, n in enumerate(GRADIENTS[name])]


@pytest.mark.parametrize(
    ("nbytes", "limit_mb"), [(0, 2), (16 * MB, 2), (16 * MB + 1, 3), (100 * MB, 13), (128 * MB, 16), (1 << 40, 16)]
)
def test_overlapped_gradients_in_auto_mode_form_eight_groups(nbytes, limit_mb):
    assert for_overlap(parse("auto"), nbytes) == Mode("auto", limit_mb)
    for fusion in ("none", size(64), index(2, 4)):
        assert for_overlap(parse(fusion), nbytes) == parse(fusion)


def test_lenet_is_one_group_by_default():
    assert members(model("lenet")) == [list(range(10))]


def test_auto_makes_groups_of_64_mb():
    groups = make_plan(model("resnet50"), parse("auto")).groups
    assert [group.nbytes <= 64 * MB for group in groups] == [True, True]
    assert sum(group.nbytes for group in groups) == 4 * sum(GRADIENTS["resnet50"])
    assert members(gradients(32, 32, 1)) == [[0, 1], [2]]
    assert members(gradients(32, 32, 1), {"mode": "auto", "config": None}) == [[0, 1], [2]]


def test_size_fills_groups_in_the_order_of_the_parameters():
    sizes = gradients(1, 1, 1, 2, 5, 0.5, 0.5, 2, 1)
    assert members(sizes, size(2)) == [[0, 1], [2], [3], [4], [5, 6], [7], [8]]
    assert members(sizes, size(14)) == [list(range(9))]


def test_size_0_and_none_fuse_nothing_whatever_the_ids_are():
    for fusion in ("none", size(0)):
        assert members(gradients(1, 1, 1, ids=[1, 2, 2]), fusion) == [[0], [1], [2]]


def test_a_split_point_is_the_last_gradient_of_its_group():
    sizes = gradients(*[1] * 6)
    assert members(sizes, index(1, 3)) == [[0, 1], [2, 3], [4, 5]]
    assert members(sizes, index(0)) == [[0], [1, 2, 3, 4, 5]]
    assert members(sizes, index(5)) == [[0, 1, 2, 3, 4, 5]]


def test_split_point_beyond_the_gradients_is_reported_and_ignored(caplog):
    with caplog.at_level(logging.WARNING):
        assert members(gradients(1, 1, 1), index(0, 7)) == [[0], [1, 2]]
    assert "fusion: split_point=7 gradients=3" in caplog.text


def test_ids_name_groups_and_0_is_alone():
    assert members(gradients(1, 1, 1, 1, 1, 1, 1, ids=[0, 0, 2, 1, 3, 2, 1])) == [[0], [1], [2, 5], [3, 6], [4]]


def test_the_mode_is_for_those_with_id_1_only():
    many = gradients(*[40] * 6, ids=[2, 1, 2, 1, 2, 1])
    assert members(many) == [[0, 2, 4], [1], [3], [5]]
    assert members(many, index(1)) == [[0, 2, 4], [1, 3], [5]]


def test_a_group_has_one_dtype():
    mixed = gradients(1, 1, 1, 1, dtypes=["float32", "float16", "float32", "float16"])
    assert members(mixed) == [[0, 2], [1, 3]]
    assert members(mixed, size(1)) == [[0], [1], [2], [3]]
    assert members(mixed, index(2)) == [[0, 2], [1], [3]]
    same_id = gradients(1, 1, ids=[4, 4], dtypes=["float32", "float16"])
    assert [group.dtype for group in make_plan(same_id, parse("auto")).groups] == ["float32", "float16"]


def test_empty_gradients_and_no_gradients():
    assert members([]) == []
    assert make_plan([], parse("auto")).pieces() == ()
    assert members(gradients(0, 0, 3), size(1)) == [[0, 1, 2]]


@pytest.mark.parametrize("fusion", ["none", "auto", size(2), index(2, 4)])
def test_every_gradient_is_in_one_group_and_finds_its_way_back(fusion):
    sizes = gradients(1, 3, 1, 1, 2, 1, 1, ids=[1, 2, 0, 1, 2, 1, 1], dtypes=["float32"] * 5 + ["float16"] * 2)
    plan = make_plan(sizes, parse(fusion), "all")
    assert sorted(i for group in plan.groups for i in group.members) == list(range(7))
    for group, runs in zip(plan.groups, plan.runs()):
        assert [i for start, stop in runs for i in range(start, stop)] == list(group.members)
    assert [i for g, start, stop in plan.pieces() for i in plan.groups[g].members[start:stop]] == list(range(7))
    assert [group.name for group in plan.groups] == [f"all/{i}" for i in range(len(plan.groups))]
    firsts = [group.members[0] for group in plan.groups]
    assert firsts == sorted(firsts)
    assert all(group.nbytes == sum(sizes[i].nbytes for i in group.members) for group in plan.groups)


def test_neighbours_are_taken_in_one_stretch():
    plan = make_plan(gradients(*[1] * 6, ids=[2, 1, 1, 1, 2, 2]), parse("auto"))
    assert plan.runs() == (((0, 1), (4, 6)), ((1, 4),))
    assert plan.pieces() == ((0, 0, 1), (1, 0, 3), (0, 1, 3))


def test_the_first_difference_of_two_plans_is_under_one_name():
    sizes = gradients(*[1] * 6)
    a, b = make_plan(sizes, parse(index(1, 3))).groups, make_plan(sizes, parse(index(1, 4))).groups
    assert a[0] == b[0]
    assert a[1].name == b[1].name
    assert a[1].members != b[1].members


def test_fusion_plan_prints_the_group_of_each_gradient():
    plan = make_plan(gradients(1, 2, 0.5, ids=[2, 1, 2]), parse(size(32)))
    assert str(plan).splitlines() == [
        "3 gradients, 3.5 MB, in 2 groups (size: up to 32 MB per group)",
        "gradients/0: 2 gradients, 1.5 MB, float32, comm_fusion 2",
        "     0  p0      1.0 MB",
        "     2  p2    512.0 KB",
        "gradients/1: 1 gradient, 2.0 MB, float32, comm_fusion 1",
        "     1  p1      2.0 MB",
    ]


def test_mindspore_fusion_configuration_becomes_a_mode():
    default = {kind: {"mode": "auto", "config": None} for kind in ("allreduce", "allgather", "reducescatter")}
    assert configured({"openstate": True, **default}) == parse("auto") == Mode("auto", 64)
    assert configured({"openstate": False, **default}) == parse("none")
    chosen = {"openstate": True, "allreduce": index(3), "allgather": size(7), "reducescatter": size(0)}
    assert configured(chosen) == Mode("index", split_points=(3,))
    assert configured(chosen, "allgather") == Mode("size", 7)
    assert configured(chosen, "reducescatter") == Mode("none")


@pytest.mark.parametrize(
    ("fusion", "error", "sentence"),
    [
        ("all", TypeError, 'must be "none", "auto" or'),
        (3, TypeError, 'must be "none", "auto" or'),
        ([2], TypeError, 'must be "none", "auto" or'),
        ({}, KeyError, "needs the key 'mode'"),
        ({"mode": "size"}, KeyError, "needs the key 'config'"),
        ({"mode": "large", "config": 1}, KeyError, "must be auto or size or index, not 'large'"),
        (size(None), TypeError, "whole number of MB"),
        (size("3"), TypeError, "whole number of MB"),
        (size(1.5), TypeError, "whole number of MB"),
        (size(True), TypeError, "whole number of MB"),
        (size(-1), ValueError, "at least 0, not -1"),
        ({"mode": "index", "config": None}, ValueError, "can't be empty"),
        (index(), ValueError, "can't be empty"),
        ({"mode": "index", "config": (1, 2)}, TypeError, "must be a list"),
        (index(1.0), TypeError, "index of a gradient"),
        (index(True), TypeError, "index of a gradient"),
        (index(-1), TypeError, "index of a gradient"),
        (index(2, 2), ValueError, "must ascend"),
        (index(3, 2), ValueError, "must ascend"),
    ],
)
def test_a_bad_configuration_is_named(fusion, error, sentence):
    with pytest.raises(error, match=sentence):
        parse(fusion)


def test_index_is_for_all_reduces_only():
    with pytest.raises(KeyError, match="must be auto or size, not 'index'"):
        configured({"allgather": index(1)}, "allgather")


def command(*words, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "ms_kungfu.fusion", *words], timeout=60, text=True, capture_output=True
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def test_the_command_shows_well_known_models_without_mindspore():
    assert command("lenet").startswith("10 gradients, 173.5 KB, in 1 group (auto: up to 64 MB per group)\n")
    shown = command("--fusion", "index:59,119", "resnet50")
    assert shown.startswith("161 gradients, 97.5 MB, in 3 groups (index: groups end at 59, 119)\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing.py"], "nothing.py is neither a file nor one of lenet"),
        (["--fusion", "size:x", "lenet"], "'x' in 'size:x' is neither a number"),
        (["--fusion", "size:-1", "lenet"], "at least 0, not -1"),
        (["--fusion", "index:3,2", "lenet"], "must ascend"),
        (["--fusion", "most", "lenet"], 'must be "none"'),
    ],
)
def test_the_command_tells_bad_input_in_one_sentence(words, sentence):
    assert sentence in command(*words, status=2)
