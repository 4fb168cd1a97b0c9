"""What policies decide, carried out on a cluster of one."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import Decision, ElasticTraining, Policy, SchedulePolicy, eviction, policy_runner
from ms_kungfu.elastic.learning_rates import learning_rate_of, set_learning_rate
from ms_kungfu.elastic.policy import HOOKS, as_policy
from ms_kungfu.monitoring import Monitor
from ms_kungfu.optimizers import AdaptiveSGDOptimizer


class Switching(nn.Momentum):
    switched = ()

    def switch_to(self, name):
        self.switched = (*self.switched, name)


def make_net():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(3)
    return nn.Dense(1, 1)


def make_data(total=24, batch=4, **options):
    x = np.arange(total, dtype=np.float32)[:, None] / total
    source = ms.dataset.NumpySlicesDataset((x, 2 * x), ["x", "y"], shuffle=False)
    return ElasticDataset(source, None if options else batch, shuffle=False, **options)


class Once(Policy):
    """Decides something after the first step."""

    def __init__(self, **changes):
        self.changes = changes

    def after_step(self, q):
        return Decision("because", **self.changes) if q.step == 1 else None


@pytest.mark.parametrize("rates", [0.1, [0.1, 0.2, 0.3, 0.4]])
def test_a_learning_rate_is_set_in_place(rates):
    net = make_net()
    optimizer = nn.Momentum(net.trainable_params(), rates, 0.0)
    gradients = (ms.Tensor([[1.0]], ms.float32), ms.Tensor([1.0], ms.float32))
    optimizer(gradients)
    before = net.weight.asnumpy().copy()
    set_learning_rate(optimizer, 0.5)
    assert learning_rate_of([optimizer], 1) == 0.5
    optimizer(gradients)
    np.testing.assert_allclose(before - net.weight.asnumpy(), 0.5, rtol=1e-6)


def test_the_rate_of_a_list_is_that_of_the_step():
    optimizer = nn.Momentum(make_net().trainable_params(), [0.1, 0.2, 0.3], 0.0)
    assert [learning_rate_of([optimizer], step) for step in (0, 2, 7)] == pytest.approx([0.1, 0.3, 0.3])
    assert learning_rate_of([], 0) is None


def test_a_schedule_and_groups_cannot_be_replaced_by_a_number():
    net = make_net()
    schedule = nn.Momentum(net.trainable_params(), nn.ExponentialDecayLR(0.1, 0.9, 4), 0.0)
    with pytest.raises(ValueError, match="has a schedule; give the optimizer"):
        set_learning_rate(schedule, 0.5)
    assert learning_rate_of([schedule], 0) is None
    groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 0.2}]
    with pytest.raises(ValueError, match="groups of parameters with their own rates"):
        set_learning_rate(nn.Momentum(groups, 0.1, 0.0), 0.5)


def train(policy, data=None, optimizer=None, steps=3, **options):
    net = make_net()
    optimizer = optimizer or nn.Momentum(net.trainable_params(), 0.1, 0.9)
    elastic = ElasticTraining(net, optimizer, dataset=data, policy=policy, **options)
    elastic.begin()
    for step in range(steps):
        elastic.step_end(loss=float(step), samples=4)
    elastic.end()
    return elastic


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "RING"}, "'RING', but the workers on a host reduce in shared memory"),
        ({"local_batch_size": 8}, "requires an ElasticDataset"),
        ({"optimizer": "ssgd"}, "no trained optimizer can switch; train with AdaptiveSGDOptimizer"),
        ({"evict": (1,)}, "evict the ranks \\[1\\], but the cluster's size is 1"),
    ],
)
def test_decision_that_cannot_be_applied_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        train(Once(**changes))


def test_decisions_of_a_policy_are_applied_and_logged(caplog):
    caplog.set_level(logging.INFO, "ms_kungfu.elastic.policy_runner")
    optimizer, data = Switching(make_net().trainable_params(), 0.1, 0.9), make_data()
    gone = []
    policy = [Once(optimizer="ssgd", evict=(0,), strategy="AUTO"), Once(learning_rate=0.25, local_batch_size=6)]
    train(policy, data, optimizer, evict=gone.extend)
    assert optimizer.switched == ("ssgd",)
    assert gone == [0]
    assert data.global_batch_size == 6
    assert float(optimizer.learning_rate.asnumpy()) == 0.25
    assert [record.getMessage() for record in caplog.records] == [
        "policy: local_batch_size=6 learning_rate=0.25 strategy=AUTO optimizer=ssgd evict=0 step=1 "
        'reason="Once: because; Once: because"'
    ]


def test_a_schedule_switches_the_adaptive_optimizer():
    optimizer = AdaptiveSGDOptimizer(nn.Momentum(make_net().trainable_params(), 0.1, 0.9))
    assert optimizer.algorithm == "sma"
    train(SchedulePolicy(optimizer={2: "ssgd"}, learning_rate={1: 0.5}), optimizer=optimizer)
    assert optimizer.algorithm == "ssgd"
    assert learning_rate_of([optimizer], 0) == 0.5


def test_an_eviction_that_fails_does_not_end_the_training(caplog):
    def refuse(ranks):
        raise RuntimeError("not now")

    assert train(Once(evict=(0,)), evict=refuse).step == 3
    assert 'eviction failed: ranks=0 error="RuntimeError: not now"' in caplog.text


def test_epochs_without_a_dataset_follow_changes_again_once_left():
    net = make_net()
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9))
    for _ in elastic.epochs(3):
        assert not elastic.changes.may_follow()
        break
    assert elastic.changes.may_follow(), "a loop by begin() and step_end() may follow"


def test_epochs_without_a_dataset_name_the_deferral_in_the_last_epoch():
    net = make_net()
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9))
    assert [elastic.changes.defers_until for _ in elastic.epochs(3)] == [None, None, "this training call ends"]
    assert elastic.changes.defers_until is None


@pytest.mark.parametrize(
    ("count", "options", "asked"),
    [
        (1, {"schedule": "5:2"}, "schedule"),
        (1, {"policy": Once()}, "policy"),
        (1, {}, ""),
        (2, {"schedule": "5:2"}, ""),
    ],
    ids=["schedule", "policy", "neither", "two epochs"],
)
def test_one_epoch_without_a_dataset_says_that_nothing_changes_in_it(caplog, count, options, asked):
    net = make_net()
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), **options)
    for _ in elastic.epochs(count):
        pass
    told = [record.message for record in caplog.records if "misuse: check=epochs" in record.message]
    assert len(told) == bool(asked)
    assert all(f"so {asked} changes nothing in this training call" in each for each in told)


def test_every_hook_is_called_at_its_time():
    calls = []

    class Watch(Policy):
        pass

    for hook in HOOKS:
        setattr(Watch, hook, lambda self, q, hook=hook: calls.append((hook, q.step, q.epoch)))
    net, data = make_net(), make_data(8, 4)
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), dataset=data, policy=Watch())
    for _ in elastic.epochs(2):
        for _ in data:
            elastic.step_end()
    assert calls == [
        ("before_train", 0, 0),
        ("before_step", 0, 0),
        ("before_epoch", 0, 0),
        ("after_step", 1, 0),
        ("before_step", 1, 0),
        ("after_step", 2, 0),
        ("before_step", 2, 0),
        ("after_epoch", 2, 1),
        ("before_epoch", 2, 1),
        ("after_step", 3, 1),
        ("before_step", 3, 1),
        ("after_step", 4, 1),
        ("before_step", 4, 1),
        ("after_epoch", 4, 2),
        ("after_train", 4, 2),
    ]


def test_the_quantities_are_those_of_the_training():
    seen = []

    class Watch(Policy):
        def after_step(self, q):
            seen.append(q)

    net, data = make_net(), make_data(24, 4)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    elastic = ElasticTraining(net, optimizer, dataset=data, policy=Watch(), monitor=Monitor(update_ratio_interval=0))
    for _ in elastic.epochs(2):
        for i, _ in enumerate(data):
            elastic.step_end(loss=float(i))
    q = seen[7]
    assert (q.step, q.epoch, q.cluster_size, q.batch_size) == (8, 1, 1, 4)
    assert (q.trained_samples, q.total_samples, q.steps_at_size) == (32, 48, 8)
    assert (q.loss, q.learning_rate) == pytest.approx((1.0, 0.1))
    assert q.step_time > 0
    assert len(q.compute_times) == 1
    assert q.gradient_noise_scale is None
    assert not q.holds_global_batch


class Asks(Policy):
    """Goes on asking, as policies do."""

    def after_step(self, q):
        return Decision("because", size=4, keeps_local_batch=True)


@pytest.mark.parametrize(
    ("holds", "sizes", "expected"),
    [
        (True, (4, 2, 4), (32, 32, 32)),
        (True, (2, 4, 2), (8, 32, 32)),  # a worker died, or a client asked for another size
        (False, (4, 2, 4), (8, 8, 8)),
    ],
)
def test_the_batch_follows_a_size_once_and_when_it_comes_true(holds, sizes, expected):
    net, data = make_net(), make_data(64, 8)
    if holds:
        data.set_batch_size(global_batch_size=8)
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), dataset=data, policy=Asks())
    steering = elastic._measuring.policies
    for expected_size in (4, None, None):
        steering.hook("after_step", elastic)
        assert steering.take_size() == expected_size
        assert data.global_batch_size == 8
    joining = ElasticTraining(
        net, nn.Momentum(net.trainable_params(), 0.1, 0.9), dataset=data, policy=Asks()
    )._measuring.policies
    joining.restore(steering.state())
    for each in (steering, joining):
        data.set_batch_size(**({"global_batch_size": 8} if holds else {"batch_size": 8}))
        for size, batch in zip(sizes, expected):
            each.on_resized(size, data)
            assert data.global_batch_size == batch
            assert each.pending_size is None


def test_outcome_of_a_resize_request_is_in_the_transferred_state():
    """It is handed over before the change is over at the others."""
    net, data = make_net(), make_data(64, 8)
    data.set_batch_size(global_batch_size=8)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    policies = ElasticTraining(net, optimizer, dataset=data, policy=Asks())._measuring.policies
    policies._keeping, policies.pending_size = (4, 1), 4
    policies.on_resized(4, data)
    assert (policies.state()["keeping"], policies.state()["pending"]) == (None, None)


@pytest.mark.parametrize(("job", "asks"), [("one", None), ("another", 4)])
def test_a_size_that_has_not_come_true_is_asked_for_again_in_another_job(job, asks, monkeypatch):
    net, data = make_net(), make_data(64, 8)
    data.set_batch_size(global_batch_size=8)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    held, goes_on = (ElasticTraining(net, optimizer, dataset=data, policy=Asks())._measuring.policies for _ in range(2))
    monkeypatch.setenv("KUNGFU_JOB", "one")
    held._keeping, held.pending_size = (4, 1), 4
    state = json.loads(json.dumps(held.state()))
    monkeypatch.setenv("KUNGFU_JOB", job)
    goes_on.restore(state)
    assert goes_on.take_size() == asks
    goes_on.on_resized(4, data)
    assert data.global_batch_size == 32


@pytest.mark.parametrize(
    ("old", "new", "expected"), [(1, 4, (64, 16)), (4, 2, (8, 2)), (2, 3, (24, 6)), (3, 1, (4, 1))]
)
def test_more_workers_get_more_shards_of_the_same_shape(old, new, expected):
    net, data = make_net(), make_data(64, global_batch_size=16, shards=4)
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), dataset=data, policy=Asks())
    elastic._measuring.policies._keeping = (new, old)
    elastic._measuring.policies.on_resized(new, data)
    assert (data.global_batch_size, data.shards) == expected
    assert data.shard_sizes() == [4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch_size": 18}, "shards=4 must divide global_batch_size"),
        ({"global_batch_size": 16, "shards": 3}, "shards=3 must divide global_batch_size"),
        ({"local_batch_size": 4}, "got only batch_size"),
    ],
)
def test_shards_that_cannot_be_assigned_are_refused(changes, message):
    data = make_data(global_batch_size=16, shards=4)
    with pytest.raises(ValueError, match=message):
        train(Once(**changes), data)
    assert (data.global_batch_size, data.shards, data.shard_sizes()) == (16, 4, [4])
    with pytest.raises(ValueError, match="has no shards"):
        train(Once(global_batch_size=16, shards=4), make_data())


def test_a_learning_rate_follows_a_global_batch_that_a_policy_changes():
    net, data = make_net(), make_data(global_batch_size=16, shards=4)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    elastic = train(Once(global_batch_size=64, shards=16), data, optimizer, lr_rule="linear")
    assert (data.global_batch_size, data.shards) == (64, 16)
    assert learning_rate_of([optimizer], 0) == pytest.approx(0.4)
    other = make_data(global_batch_size=16, shards=4)
    other.restore(json.loads(json.dumps(data.state())))  # as a joiner does
    assert (other.global_batch_size, other.shards, other.shard_sizes()) == (64, 16, [4])
    assert elastic.step == 3


def test_batch_changed_by_a_policy_is_partitioned_again():
    net, data = make_net(), make_data(24, 4)
    policy = SchedulePolicy(global_batch_size={2: 8})
    elastic = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), dataset=data, policy=policy)
    seen = []
    for _ in elastic.epochs(1):
        for x, _ in data:
            seen.append(np.round(x.asnumpy()[:, 0] * 24).astype(int).tolist())
            elastic.step_end()
    assert [len(batch) for batch in seen] == [4, 4, 8, 8]
    assert sum(seen, []) == list(range(24))
    assert data.state()["batch"] == [None, 8]
    other = make_data(24, 4)
    other.restore(data.state())
    assert other.global_batch_size == 8


class Ranks:
    """This worker is "b"; the others are told of by name."""

    def __init__(self, monkeypatch, *names):
        self.names, self.version = list(names), 0
        uids = {name: (ord(name[0]) << 16) + len(name) for name in ("a", "b", "c", "d", "cc")}
        monkeypatch.setattr(policy_runner.runtime, "current_cluster_size", lambda: len(self.names))
        monkeypatch.setattr(policy_runner.runtime, "current_rank", lambda: self.names.index("b"))
        monkeypatch.setattr(eviction.membership, "cluster_version", lambda: self.version)
        there = lambda: {rank: uids[name] for rank, name in enumerate(self.names)}  # noqa: E731
        monkeypatch.setattr(eviction, "_uids", there, raising=False)
        monkeypatch.setattr(policy_runner, "agree", lambda decision: (decision, 0))
        self.training = SimpleNamespace(step=1, epoch=0, dataset=None, optimizers=[])
        self.sent = []

    def steering(self):
        once = as_policy(Once(evict=(2,)))
        return policy_runner.PolicyRunner(once, Monitor(update_ratio_interval=0), self.sent.append, None)

    def change(self, *names):
        self.names, self.version = list(names), self.version + 1

    def ask(self, steers):
        steers.hook("after_step", self.training)
        self.training.step += 1


def test_eviction_is_requested_again_if_the_requester_has_failed(monkeypatch):
    ranks = Ranks(monkeypatch, "a", "b", "c", "d")
    steers = ranks.steering()
    ranks.ask(steers)
    assert ranks.sent == [], "rank 0 asks"
    for names in (("b", "c", "d"), ("b", "d"), ("b",)):
        ranks.change(*names)
        steers.took(0.1)
        ranks.ask(steers)
        assert ranks.sent == [[1]], "rank 0 was gone before anybody left"


def test_joining_worker_evicts_no_worker_at_a_reused_address(monkeypatch):
    """It gets the state before the others have drawn their conclusions from the change, and may be the lowest rank."""
    ranks = Ranks(monkeypatch, "a", "c", "d", "b")
    monkeypatch.setattr(eviction.membership, "peer_of", lambda rank: ranks.names[rank][0])  # cc has c's address
    steers = ranks.steering()
    monkeypatch.setattr(policy_runner, "agree", lambda decision: (Decision("slow", evict=(1,)), 0))
    ranks.ask(steers)  # rank 0 sends c away
    held = json.loads(json.dumps(steers.state()))
    monkeypatch.setattr(policy_runner, "agree", lambda decision: (None, 0))
    ranks.change("b", "cc", "d")
    joining = ranks.steering()
    joining.restore(held)
    joining.took(0.1)
    ranks.ask(joining)
    assert ranks.sent == []
    assert joining.state()["eviction"] is None


def test_an_eviction_is_not_taken_along_into_another_job(monkeypatch):
    ranks = Ranks(monkeypatch, "a", "b", "c", "d")
    monkeypatch.setenv("KUNGFU_JOB", "one")
    steers = ranks.steering()
    ranks.ask(steers)
    held = steers.state()
    assert held["eviction"] is not None
    monkeypatch.setenv("KUNGFU_JOB", "another")
    steers.restore(held)
    assert steers.state()["eviction"] is None
