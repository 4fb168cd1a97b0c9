"""The estimators of the gradient noise scale, against problems where it is known."""

import json
import math

import numpy as np
import pytest

from ms_kungfu.monitoring.noise_scale import NoiseScaleEstimator, unbiased_estimates


def gradients(random, truth, sigma, batches):
    """Each worker's gradient: the mean over its samples, with a spread of `sigma` in each element of a sample's."""
    return [truth + sigma / math.sqrt(b) * random.standard_normal(truth.size) for b in batches]


def measure(found, batches):
    """What a monitor takes: the mean of the squared norms, and that of the mean over all samples."""
    mean = np.average(found, axis=0, weights=batches)
    return float(np.mean([g @ g for g in found])), float(mean @ mean), batches


@pytest.mark.parametrize("batches", [(4, 4), (8, 8, 8), (3, 4, 4, 4, 4, 5, 5)])
def test_the_estimates_of_a_step_are_unbiased(batches):
    random, truth, sigma = np.random.default_rng(1), np.full(50, 0.3), 0.5
    estimates = [unbiased_estimates(*measure(gradients(random, truth, sigma, batches), batches)) for _ in range(4000)]
    squared, covariance = np.array(estimates).T
    # within four standard errors of the mean
    assert squared.mean() == pytest.approx(truth @ truth, abs=4 * squared.std() / math.sqrt(4000))
    assert covariance.mean() == pytest.approx(50 * sigma**2, abs=4 * covariance.std() / math.sqrt(4000))


@pytest.mark.parametrize(("workers", "batch"), [(2, 4), (4, 8), (8, 1)])
def test_the_noise_scale_of_a_quadratic_is_found_within_10_percent(workers, batch):
    random = np.random.default_rng(workers)
    curvature = np.linspace(0.1, 2.0, 400)
    theta = np.full(400, 0.2)
    truth, sigma = curvature * theta, 0.4
    known = 400 * sigma**2 / (truth @ truth)
    estimator = NoiseScaleEstimator(half_life=200)
    for _ in range(600):
        found = gradients(random, truth, sigma, [batch] * workers)
        assert estimator.update(*measure(found, [batch] * workers))
    assert estimator.noise_scale == pytest.approx(known, rel=0.1)
    assert estimator.gradient_squared_norm == pytest.approx(truth @ truth, rel=0.1)
    assert estimator.covariance_trace == pytest.approx(400 * sigma**2, rel=0.1)


def test_the_averages_are_those_of_the_two_numbers_and_not_of_their_ratio():
    estimator = NoiseScaleEstimator(half_life=1)
    steps = [(3.0, 2.0), (5.0, 2.5), (4.0, 2.8)]
    for local, reduced in steps:
        estimator.update(local, reduced, (1, 1))
    pairs = np.array([unbiased_estimates(local, reduced, (1, 1)) for local, reduced in steps])
    weights = np.array([0.25, 0.5, 1.0])
    squared, covariance = (pairs * weights[:, None]).sum(axis=0) / weights.sum()
    assert estimator.gradient_squared_norm == pytest.approx(squared)
    assert estimator.covariance_trace == pytest.approx(covariance)
    assert estimator.noise_scale == pytest.approx(covariance / squared)


def test_a_change_of_the_size_does_not_move_the_estimate():
    random, truth = np.random.default_rng(3), np.full(3000, 0.1)
    estimator = NoiseScaleEstimator(half_life=50)
    seen = []
    for step in range(600):
        batches = [4] * (2 if step < 300 else 8)
        estimator.update(*measure(gradients(random, truth, 0.5, batches), batches))
        seen.append(estimator.noise_scale)
    assert np.mean(seen[200:300]) == pytest.approx(25.0, rel=0.1)
    assert np.mean(seen[400:]) == pytest.approx(25.0, rel=0.1)


@pytest.mark.parametrize(
    ("local", "reduced", "batches"),
    [(1.0, 1.0, (4,)), (1.0, 0.5, (4, 0)), (math.inf, 0.5, (4, 4)), (1.0, math.nan, (4, 4))],
)
def test_a_step_that_says_nothing_is_left_out(local, reduced, batches):
    estimator = NoiseScaleEstimator()
    assert estimator.noise_scale is None
    assert not estimator.update(local, reduced, batches)
    estimator.update(2.0, 1.5, (4, 4))
    before = estimator.noise_scale
    assert not estimator.update(local, reduced, batches)
    assert estimator.noise_scale == before
    assert estimator.steps == 1


def test_noise_that_hides_the_gradient_is_infinite_and_none_is_zero():
    estimator = NoiseScaleEstimator()
    estimator.update(4.0, 1.0, (4, 4))  # less than half: |G|^2 comes out negative
    assert estimator.noise_scale == math.inf
    estimator = NoiseScaleEstimator()
    estimator.update(1.0, 1.0, (4, 4))
    assert estimator.noise_scale == 0.0


def test_another_worker_goes_on_from_its_state():
    one, other = NoiseScaleEstimator(), NoiseScaleEstimator()
    for i in range(5):
        one.update(2.0 + i, 1.5, (4, 4))
    other.restore(json.loads(json.dumps(one.state())))
    for estimator in (one, other):
        estimator.update(3.0, 2.5, (4, 4, 4))
    assert one.noise_scale == other.noise_scale
    assert one.steps == other.steps == 6


@pytest.mark.parametrize("half_life", [0, -1, math.nan])
def test_a_half_life_is_positive(half_life):
    with pytest.raises(ValueError, match="half_life"):
        NoiseScaleEstimator(half_life)
