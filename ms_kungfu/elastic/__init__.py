"""Elastic training: training continues while workers join and leave.

The package imports its public classes on first use, because the launcher doesn't need them.

The following sections describe `ElasticTraining`. All workers make the same calls in the same
order.

*Training calls*: a training call is one run of a training loop, from `begin` to `end`. For example,
each `Model.train` with a `KungFuElasticCallback` is one training call.

*Joining and leaving*: a joining worker runs the program from the beginning. Its first `begin`
receives the state of the other workers. Its loop then continues in the same epoch, and at the same
sample, as the other workers' loops. Before that `begin`, the program must not call any collective
except `sync_net_parameters`. On a worker that has left, `should_stop` is true, the dataset yields
no more batches, and `step_end` has no effect. So the loop and the program end normally, with exit
status 0.

*Schedule*: at the step of a schedule entry, the workers request the entry's size. The cluster
changes as soon as the new workers are ready. If the cluster hasn't reached that size when the next
entry is due, that entry's size replaces the requested size. If the schedule is a dict or a string,
the launcher starts the workers for the next entry early. If these workers are ready at the entry's
step, the resize doesn't have to wait for them (docs/resizing.md).

*Learning rates*: `lr_rule` applies to all optimizers of ``mindspore.nn`` in `trained`. It
multiplies their rates by a factor. For ``"linear"`` the factor is the current size divided by the
initial size. For ``"sqrt"`` it is the square root of that ratio. If `lr_rule` is a function, the
function returns the factor. The initial size is the cluster size at the first `begin` with that
optimizer. If training uses shards, the rule uses the global batch size instead of the cluster size,
because a resize doesn't change that batch size.

*Asynchronous*: each worker runs its steps independently. This is the default if all optimizers in
`trained` are asynchronous (`PairAveragingOptimizer`). The workers meet after a step only for one of
these reasons:

- a change of the cluster;
- a schedule entry, as soon as one worker has reached the entry's step;
- a checkpoint;
- the end of a training call.

`ms_kungfu.membership.sync_points` contains the correctness argument. When the workers have met, all
of them continue from the step, epoch and data position of the worker that is furthest ahead. The
first worker that finishes ends the training call for all workers: on the others, `should_stop`
becomes true. If a loop doesn't use `epochs`, the program must call `end`. No two living workers use
the same sample in an epoch. Samples that slower workers haven't reached are skipped, so
asynchronous training rejects a ledger. Asynchronous training also rejects the options for which the
workers must meet at every step (`policy`, `monitor`, `wait`). With ``asynchronous=False`` the
workers meet at every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ms_kungfu.elastic.policy import Decision, Metrics, Policies, Policy

if TYPE_CHECKING:
    from ms_kungfu.elastic.differences import consensus
    from ms_kungfu.elastic.means import mean
    from ms_kungfu.elastic.policies import (
        NoiseScaleLearningRate,
        NoiseScalePolicy,
        SchedulePolicy,
        StragglerPolicy,
        ThroughputPolicy,
    )
    from ms_kungfu.elastic.sharded_step import ShardedStep
    from ms_kungfu.elastic.state import Component
    from ms_kungfu.elastic.training import ElasticTraining
    from ms_kungfu.membership import evict

__all__ = [
    "Component",
    "Decision",
    "ElasticTraining",
    "NoiseScaleLearningRate",
    "NoiseScalePolicy",
    "Policies",
    "Policy",
    "Metrics",
    "SchedulePolicy",
    "ShardedStep",
    "StragglerPolicy",
    "ThroughputPolicy",
    "consensus",
    "evict",
    "mean",
]


def __getattr__(name: str) -> Any:
    if name == "ElasticTraining":
        from ms_kungfu.elastic.training import ElasticTraining

        return ElasticTraining
    if name == "ShardedStep":
        from ms_kungfu.elastic.sharded_step import ShardedStep

        return ShardedStep
    if name == "consensus":
        from ms_kungfu.elastic.differences import consensus

        return consensus
    if name == "mean":
        from ms_kungfu.elastic.means import mean

        return mean
    if name == "evict":
        from ms_kungfu.membership import evict

        return evict
    if name == "Component":
        from ms_kungfu.elastic.state import Component

        return Component
    if name in __all__:
        from ms_kungfu.elastic import policies

        return getattr(policies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
