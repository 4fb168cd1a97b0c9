"""The factor that a learning rate is multiplied by at a size of the cluster."""

from __future__ import annotations

import math

import pytest

from ms_kungfu.elastic.lr_rule import parse_lr_rule


@pytest.mark.parametrize(
    ("rule", "size", "start", "factor"),
    [
        ("linear", 4, 1, 4.0),
        ("linear", 1, 4, 0.25),
        ("sqrt", 4, 1, 2.0),
        ("sqrt", 3, 2, math.sqrt(1.5)),
        (lambda size, start: 1 + (size - start) / 10, 4, 2, 1.2),
        (lambda size, start: size, 3, 2, 3.0),
    ],
)
def test_factors(rule, size, start, factor):
    assert parse_lr_rule(rule)(size, start) == factor


def test_none_has_no_factor():
    assert parse_lr_rule("none") is None


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_the_size_at_the_start_has_factor_1(rule):
    assert all(parse_lr_rule(rule)(size, size) == 1.0 for size in (1, 2, 3, 7))


@pytest.mark.parametrize(
    ("rule", "error"), [("lineal", ValueError), ("", ValueError), (2, TypeError), (None, TypeError)]
)
def test_malformed_learning_rate_rule_is_refused(rule, error):
    with pytest.raises(error, match="use 'linear', 'sqrt', 'none' or a function"):
        parse_lr_rule(rule)


@pytest.mark.parametrize("returned", [0, -1, math.inf, math.nan, None, "much"])
def test_a_function_has_to_return_a_factor(returned):
    rule = parse_lr_rule(lambda size, start: returned)
    with pytest.raises(ValueError, match=r"lr_rule\(4, 2\) returned .*; return a factor above 0"):
        rule(4, 2)
