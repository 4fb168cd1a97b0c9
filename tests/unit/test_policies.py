"""The policies that come with the package, on trainings that are simulated."""

import json
import math

import numpy as np
import pytest

from ms_kungfu.elastic.policies import (
    NoiseScaleLearningRate,
    NoiseScalePolicy,
    SchedulePolicy,
    StragglerPolicy,
    ThroughputPolicy,
)
from ms_kungfu.elastic.policies.throughput import candidates
from ms_kungfu.elastic.policy import Decision, Metrics, as_policy
from ms_kungfu.monitoring.noise_scale import NoiseScaleEstimator


class Cluster:
    """Steps of a training whose times are given; follows what the policy wants. `resize` seconds each change."""

    def __init__(self, policy, step_time, size=1, batch=8, resize=4.0, noise=lambda step: None, **known):
        self.policy, self.step_time, self.size, self.batch, self.resize = policy, step_time, size, batch, resize
        self.noise, self.known = noise, known
        self.shards = known.pop("shards", 0)
        self.step = self.at_size = self.samples = 0
        self.time = self.worker_seconds = 0.0
        self.last_resize = None
        self.sizes, self.reasons = [], []

    def run(self, steps):
        for _ in range(steps):
            seconds = self.step_time(self.size)
            self.step, self.at_size = self.step + 1, self.at_size + 1
            self.time, self.worker_seconds = self.time + seconds, self.worker_seconds + seconds * self.size
            self.samples += self.size * self.batch
            self.sizes.append(self.size)
            noise = self.noise(self.step)
            self.follow(
                self.policy.after_step(
                    Metrics(
                        step=self.step,
                        cluster_size=self.size,
                        batch_size=self.size * self.batch,
                        trained_samples=self.samples,
                        steps_at_size=self.at_size,
                        step_time=seconds,
                        communication_time=seconds - self.step_time(1),
                        gradient_noise_scale=noise if self.size > 1 or self.shards > 1 else None,
                        noise_scale_steps=self.step if self.size > 1 or self.shards > 1 else 0,
                        shards=self.shards or None,
                        training_time=self.time,
                        resize_time=self.last_resize,
                        **self.known,
                    )
                )
            )
        return self

    def follow(self, decision):
        if decision is None:
            return
        self.reasons.append(decision.reason)
        if decision.size is not None and decision.size != self.size:
            self.time += self.resize
            self.worker_seconds += self.resize * max(self.size, decision.size)
            self.size, self.at_size, self.last_resize = decision.size, 0, self.resize


# -- schedule ---------------------------------------------------------------------------------------------------------


def test_a_schedule_changes_everything_at_its_step():
    policy = SchedulePolicy("0:2,10:4", learning_rate={10: 0.1, 20: 0.01}, optimizer={20: "ssgd"})
    resharding = SchedulePolicy(global_batch_size={2: 64, 3: 32}, shards={2: 16})
    assert resharding.after_step(Metrics(step=2)).changes == {"global_batch_size": 64, "shards": 16}
    assert policy.before_train(Metrics()) == Decision("the schedule's entry for step 0", size=2)
    assert policy.before_train(Metrics(step=10)) is None
    assert policy.after_step(Metrics(step=9)) is None
    assert policy.after_step(Metrics(step=10)).changes == {"size": 4, "learning_rate": 0.1}
    assert policy.after_step(Metrics(step=20)).changes == {"learning_rate": 0.01, "optimizer": "ssgd"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": "10:0"}, ValueError, "'10:0'"),
        ({"momentum": {1: 0.9}}, TypeError, "can't change 'momentum'"),
        ({"learning_rate": {-1: 0.1}}, ValueError, "a step must be an integer of 0 or more"),
        ({"local_batch_size": {3: 0}}, ValueError, "local_batch_size must be an integer of 1 or more"),
        ({"shards": {3: 4}, "global_batch_size": {2: 8}}, ValueError, "a decision with shards needs global_batch_size"),
    ],
)
def test_a_wrong_schedule_is_refused_where_it_is_given(arguments, error, message):
    with pytest.raises(error, match=message):
        SchedulePolicy(**arguments)


# -- throughput -------------------------------------------------------------------------------------------------------


def contended(size):
    """Ideal up to 4 workers, as slow as they are many beyond: two cores each of eight."""
    return 0.1 * max(1, size / 4)


def test_throughput_is_followed_up_to_where_it_ends():
    cluster = Cluster(ThroughputPolicy(16, window=5), contended).run(200)
    visited = [size for i, size in enumerate(cluster.sizes) if i == 0 or size != cluster.sizes[i - 1]]
    assert visited == [1, 2, 4, 8, 4]
    assert cluster.sizes[-150:] == [4] * 150
    assert "8 workers train 320 samples/s, 1.00 times as many as 4 workers" in cluster.reasons[-1]


def test_the_maximum_is_not_exceeded_when_everything_scales():
    cluster = Cluster(ThroughputPolicy(6, min_size=2, window=5), lambda size: 0.1, size=2).run(100)
    assert sorted(set(cluster.sizes)) == [2, 4, 6]
    assert cluster.size == 6


def test_a_neighbour_on_the_machine_starts_the_search_anew():
    cluster = Cluster(ThroughputPolicy(8, window=5), contended).run(100)
    assert cluster.size == 4
    cluster.step_time = lambda size: 0.2 * size  # one core is left
    cluster.run(100)
    assert cluster.size == 1
    assert "throughput at 4 workers went from 320 to 40 samples/s; searching anew" in cluster.reasons
    cluster.step_time = lambda size: 0.1
    cluster.run(150)
    assert cluster.size == 8


def test_the_first_steps_at_a_size_do_not_count():
    policy = ThroughputPolicy(4, window=3, warmup=2)
    slow_start = {1: 5.0, 2: 5.0}
    cluster = Cluster(policy, lambda size: slow_start.get(cluster.at_size + 1, 0.1))
    cluster.run(60)
    assert cluster.size == 4


# -- stragglers -------------------------------------------------------------------------------------------------------


def compute(policy, times, steps, at=10):
    made = []
    for step in range(steps):
        q = Metrics(step=step, cluster_size=len(times), steps_at_size=at + step, compute_times=times)
        made.append(policy.after_step(q))
    return made


def test_a_worker_that_stays_slow_is_sent_away():
    made = compute(StragglerPolicy(patience=5), (0.1, 0.11, 0.35, 0.1), 6)
    assert made[:4] == [None] * 4
    assert made[4].changes == {"evict": (2,)}
    assert "rank 2 has computed more than 2 times as long" in made[4].reason
    assert made[5] is None, "one eviction at a time"


def test_of_two_workers_the_other_one_is_the_measure():
    assert compute(StragglerPolicy(patience=1), (0.5, 0.1), 1)[0].evict == (0,)


@pytest.mark.parametrize(
    ("times", "options"),
    [
        ((0.1, 0.19, 0.1), {}),  # not slow enough
        ((0.1,), {}),
        ((0.1, 0.3), {"min_size": 2}),
        ((0.1, 0.24, 0.25, 0.1, 0.24), {"slowdown": 2.2}),  # two are as slow: the next one would hold up all the same
    ],
)
def test_straggler_policy_evicts_only_if_needed(times, options):
    assert compute(StragglerPolicy(patience=3, **options), times, 20) == [None] * 20


def test_a_worker_that_is_slow_now_and_then_stays():
    policy = StragglerPolicy(patience=4)
    made = [compute(policy, (0.1, 0.1, 0.4 if i % 4 else 0.1), 1)[0] for i in range(40)]
    assert made == [None] * 40


def test_compilation_after_a_change_makes_no_worker_a_straggler():
    assert compute(StragglerPolicy(patience=1, warmup=3), (0.1, 5.0), 3, at=1) == [None] * 3


# -- noise scale ------------------------------------------------------------------------------------------------------


def congested(size):
    return 0.1 + 0.004 * (size - 1) ** 2


def test_noise_scale_policy_grows_until_communication_costs_too_much():
    cluster = Cluster(NoiseScalePolicy(8, price=0.25), congested, noise=lambda step: 4000.0).run(900)
    visited = [size for i, size in enumerate(cluster.sizes) if i == 0 or size != cluster.sizes[i - 1]]
    assert visited[:3] == [1, 2, 4]
    # 8 is tried once, as nothing says beforehand that the network is congested there
    assert visited in ([1, 2, 4], [1, 2, 4, 8, 4])
    assert cluster.sizes.count(8) <= 25
    assert cluster.sizes[-200:] == [4] * 200
    assert "one worker can't measure the noise scale alone" in cluster.reasons[0]
    assert "noise scale 4e+03 at a batch of 16: 4 workers instead of 2 cost" in cluster.reasons[1]


def test_a_worker_alone_measures_the_noise_of_its_shards():
    def run(shards, noise):
        policy = NoiseScalePolicy(4, probe=50)
        return Cluster(policy, lambda size: 0.1, noise=lambda step: noise, shards=shards).run(900)

    assert set(run(4, 1.0).sizes) == {1}
    grown = run(4, 1000.0)
    assert grown.size == 4
    assert "noise scale 1e+03 at a batch of 8" in grown.reasons[0]
    for shards in (0, 1):  # of one shard nothing can be told
        assert "one worker can't measure the noise scale alone" in run(shards, 1.0).reasons[0]


def test_noise_scale_policy_shrinks_once_the_noise_has_dropped():
    noise = lambda step: 500.0 if step < 500 else 4.0  # noqa: E731
    cluster = Cluster(NoiseScalePolicy(8, min_size=2), lambda size: 0.1, size=2, noise=noise).run(1000)
    assert max(cluster.sizes) == 8
    assert cluster.sizes[495] == 8
    assert cluster.size == 2


def test_lagging_rise_of_the_noise_scale_does_not_revert_a_change():
    times = {1: 1.0, 2: 1.06, 4: 1.45, 8: 3.4}
    noise = lambda step: min(4000.0, 82 * math.exp(0.0435 * (step - 25)))  # noqa: E731
    policy = NoiseScalePolicy(8, min_size=2)
    cluster = Cluster(policy, times.__getitem__, size=2, resize=0.4, noise=noise, total_samples=10_000).run(300)
    first = cluster.sizes.index(4)
    assert 2 not in cluster.sizes[first:]
    assert cluster.size == 4


def test_without_noise_it_stays_small():
    cluster = Cluster(NoiseScalePolicy(8, min_size=2), lambda size: 0.1, size=2, noise=lambda step: 1.0).run(500)
    assert set(cluster.sizes) == {2}


def test_a_noise_scale_around_a_border_does_not_make_it_swing():
    random = np.random.default_rng(1)
    noise = lambda step: float(36 * math.exp(random.normal(0, 0.3)))  # noqa: E731
    cluster = Cluster(NoiseScalePolicy(8, min_size=2, resize_time=2), lambda size: 0.1, size=2, noise=noise)
    cluster.run(3000)
    changes = sum(a != b for a, b in zip(cluster.sizes, cluster.sizes[1:]))
    assert changes <= 3


@pytest.mark.parametrize("left", [100, 100_000])
def test_a_resize_that_does_not_pay_before_the_end_is_left(left):
    policy = NoiseScalePolicy(4, min_size=2, resize_time=10)
    cluster = Cluster(policy, lambda size: 0.1, size=2, resize=10, noise=lambda step: 1e4, total_samples=left + 16 * 60)
    cluster.run(60)
    assert cluster.size == (2 if left == 100 else 4)


def test_noise_that_hides_the_gradient_counts_as_much_noise():
    cluster = Cluster(NoiseScalePolicy(8, min_size=2), lambda size: 0.1, size=2, noise=lambda step: math.inf)
    assert cluster.run(600).size == 8


def test_price_decides_between_time_and_worker_seconds():
    sizes = {}
    for price in (0, 0.5, 1):
        policy = NoiseScalePolicy(16, min_size=2, price=price, max_step=4)
        sizes[price] = Cluster(policy, lambda size: 0.1 + 0.002 * size, size=2, noise=lambda step: 64.0).run(2000).size
    assert sizes[1] == 2
    assert sizes[1] < sizes[0.5] < sizes[0]


def test_a_held_global_batch_is_to_grow_with_the_cluster():
    policy = NoiseScalePolicy(4, min_size=2, patience=1, min_measurements=0)
    made = [
        policy.after_step(
            Metrics(
                step=i,
                cluster_size=2,
                batch_size=32,
                holds_global_batch=True,
                steps_at_size=i,
                step_time=0.1,
                gradient_noise_scale=1e4,
                noise_scale_steps=i,
                training_time=100.0,
            )  # fmt: skip
        )
        for i in range(1, 20)
    ]
    decision = next(d for d in made if d is not None)
    assert decision.changes == {"size": 4, "keeps_local_batch": True}


def test_another_worker_decides_alike_with_its_state():
    noise = lambda step: 400.0  # noqa: E731
    one = Cluster(NoiseScalePolicy(8, min_size=2), congested, size=2, noise=noise).run(57)
    other = NoiseScalePolicy(8, min_size=2)
    other.restore(json.loads(json.dumps(one.policy.state())))
    assert vars(other) == vars(one.policy)


def test_a_single_worker_measures_again_after_a_while():
    policy = NoiseScalePolicy(4, probe=50, price=1.0)
    cluster = Cluster(policy, lambda size: 0.1, noise=lambda step: 1.0)
    cluster.noise = lambda step: 1.0
    cluster.run(30)
    assert 2 in cluster.sizes
    q = Metrics(cluster_size=1, batch_size=8, step=60, steps_at_size=50, step_time=0.1, gradient_noise_scale=1.0,
                   noise_scale_steps=30)  # fmt: skip
    assert policy.after_step(q).size == 2


def quadratic(policies, size, seed, resize=4.0, compute=0.5, network=0.024, batch=8):
    """SGD on half of |theta|^2 with known noise; what examples/adaptive does, with a clock that is simulated.

    In (time, worker-seconds, sizes) until the noise scale is 2400.
    """
    dimension, trace = 20_000, 16.0
    random = np.random.default_rng(seed)
    theta = np.full(dimension, math.sqrt(0.5 / dimension), np.float32)
    estimator, policy, rate = NoiseScaleEstimator(15), as_policy(policies), 0.03
    time = worker_seconds = 0.0
    sizes, at_size, samples, last_resize = [], 0, 0, None
    while trace / float(theta @ theta) < 2400 and len(sizes) < 2000:
        spread = np.float32(math.sqrt(trace / dimension / batch))
        found = theta + spread * random.standard_normal((size, dimension), dtype=np.float32)
        mean = found.mean(axis=0)
        theta = theta - np.float32(rate) * mean
        if size > 1:
            estimator.update(float(np.mean(np.einsum("ij,ij->i", found, found))), float(mean @ mean), [batch] * size)
        communication = network * (size - 1) ** 2
        seconds = (compute + communication) * (1 + 0.03 * random.standard_normal())
        time, worker_seconds = time + seconds, worker_seconds + size * seconds
        sizes.append(size)
        at_size, samples = at_size + 1, samples + size * batch
        decision = policy.after_step(
            Metrics(
                step=len(sizes),
                cluster_size=size,
                batch_size=size * batch,
                trained_samples=samples,
                total_samples=8000,
                steps_at_size=at_size,
                step_time=seconds,
                communication_time=communication,
                gradient_noise_scale=estimator.noise_scale,
                noise_scale_steps=estimator.steps,
                training_time=time,
                resize_time=last_resize,
            )  # fmt: skip
        )
        if decision is None:
            continue
        rate = decision.learning_rate or rate
        if decision.size is not None and decision.size != size:
            last_resize = resize if decision.size > size else 0.2
            time, worker_seconds = time + last_resize, worker_seconds + last_resize * max(size, decision.size)
            size, at_size = decision.size, 0
    return time, worker_seconds, sizes


def test_noise_scale_policy_costs_at_most_10_percent_over_best_fixed_size():
    rate = NoiseScaleLearningRate
    fixed = {n: np.mean([quadratic([rate(0.3)], n, s)[:2] for s in (1, 2)], axis=0) for n in (2, 4, 8)}
    best = min(fixed, key=lambda n: fixed[n][0] * fixed[n][1])
    assert best == 4, fixed
    for seed in (1, 2, 3):
        ours = quadratic([NoiseScalePolicy(8, 2), rate(0.3)], 2, seed)
        assert ours[0] <= 1.1 * fixed[best][0]
        assert ours[1] <= 1.1 * fixed[best][1]
        assert max(ours[2]) > min(ours[2])


# -- learning rate ----------------------------------------------------------------------------------------------------


def test_the_rate_fits_noise_and_batch():
    policy = NoiseScaleLearningRate(0.3, min_measurements=0)
    q = Metrics(batch_size=16, gradient_noise_scale=48.0)
    assert policy.after_step(q).learning_rate == pytest.approx(0.075)
    assert policy.after_step(q) is None
    assert policy.after_step(Metrics(batch_size=16, gradient_noise_scale=49.0)) is None
    assert policy.after_step(Metrics(batch_size=32, gradient_noise_scale=48.0)).learning_rate == pytest.approx(0.12)
    assert NoiseScaleLearningRate(0.3, exponent=0.5, min_measurements=0).after_step(q).learning_rate == 0.15
    assert NoiseScaleLearningRate(0.3).after_step(q) is None, "not before it was measured a few times"


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes_are_doubled_up_to_the_maximum():
    assert candidates(1, 8, None) == (1, 2, 4, 8)
    assert candidates(3, 10, None) == (3, 6, 10)
    assert candidates(2, 5, [8, 4, 2, 1]) == (2, 4)
    with pytest.raises(ValueError, match="lies between"):
        candidates(3, 3, [1, 2])
    with pytest.raises(ValueError, match="got min_size=4 and max_size=2"):
        candidates(4, 2, None)
