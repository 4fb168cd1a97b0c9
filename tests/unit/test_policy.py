"""Decisions and how several policies make one."""

import dataclasses

import pytest

from ms_kungfu.elastic.policy import HOOKS, Decision, Metrics, Policies, Policy, as_policy, combine


class Wants(Policy):
    def __init__(self, hook="after_step", **changes):
        self.changes = changes
        self.seen = []
        setattr(self, hook, self.answer)

    def answer(self, q):
        self.seen.append(q)
        return Decision("because", **self.changes) if self.changes else None

    def state(self):
        return len(self.seen)

    def restore(self, state):
        self.seen = [None] * state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": 0}, "size must be an integer of 1 or more, got 0"),
        ({"size": 2.0}, "size must be an integer"),
        ({"global_batch_size": True}, "global_batch_size must be an integer"),
        ({"global_batch_size": 8, "local_batch_size": 2}, "can't set both"),
        ({"shards": 4}, "a decision with shards needs global_batch_size"),
        ({"global_batch_size": 8, "shards": 0}, "shards must be an integer of 1 or more, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a number"),
        ({"learning_rate": -0.1}, "learning_rate must be a number"),
        ({"evict": (-1,)}, "evict must contain only ranks"),
    ],
)
def test_a_decision_that_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Decision("because", **changes)


def test_a_decision_has_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Decision("", size=2)


def test_a_decision_survives_the_way_to_the_other_workers():
    for decision in (
        Decision("a", size=3, learning_rate=0.1, evict=(0, 2)),
        Decision("b", local_batch_size=4, optimizer="ssgd", strategy="AUTO"),
        Decision("c", global_batch_size=64, shards=16),
    ):
        assert Decision.from_json(decision.to_json()) == decision
    assert set(Decision("c", size=1).to_json()) == {"reason", "size"}


def test_the_first_policy_has_its_way_and_the_others_the_rest():
    made = combine(
        [
            Decision("one", size=4),
            Decision("two", size=2, learning_rate=0.1, evict=(1,)),
            Decision("three", learning_rate=0.2, local_batch_size=8),
            Decision("four", global_batch_size=16, shards=4),
        ]
    )
    assert made == Decision("one; two; three", size=4, learning_rate=0.1, local_batch_size=8)
    assert combine([]) is None


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_reaches_every_policy(hook):
    parts = [Wants(hook), Wants(hook, size=2), Wants(hook, size=3, learning_rate=0.5)]
    q = Metrics(step=7)
    decision = as_policy(parts).decide(hook, q)
    assert decision == Decision("Wants: because; Wants: because", size=2, learning_rate=0.5)
    assert [part.seen for part in parts] == [[q]] * 3


def test_policies_nest_and_carry_their_state():
    parts = [Wants(), Wants(size=2)]
    policies = as_policy(Policies(tuple(parts)))
    for _ in range(3):
        policies.after_step(Metrics())
    others = [Wants(), Wants(size=2)]
    as_policy(others).restore(policies.state())
    assert [len(part.seen) for part in others] == [3, 3]


def test_a_policy_that_overrides_nothing_changes_nothing():
    for hook in HOOKS:
        assert as_policy(Policy()).decide(hook, Metrics()) is None
    assert as_policy(None).parts == ()


@pytest.mark.parametrize("wrong", ["10:2", [None], 3, [Policy(), "x"]])
def test_object_that_is_no_policy_is_refused(wrong):
    with pytest.raises(TypeError, match="policy must be a ms_kungfu.elastic.Policy"):
        as_policy(wrong)


def test_quantities_cannot_be_changed_by_a_policy():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Metrics().step = 3
    assert Metrics(batch_size=12, cluster_size=3).local_batch_size == 4
