"""Training that continues while workers come and go.

What users touch loads on first use, since the launcher needs none of it.

The rest of this text is about `ElasticTraining`. All workers make the same calls in the same order.

*Joining and leaving*: a joining worker runs the program from its start. Its first `begin` returns
with the state of the others, and the loop goes on in the epoch, and at the sample, where they are.
Until then its program must not call collectives other than `sync_net_parameters`. A worker that has
left finds `should_stop` true, its dataset ended and `step_end` without effect. Its loop and its
program end by themselves, with exit status 0.

*Schedule*: a size is requested at its step, and the cluster changes once the new workers are ready.
A later entry takes the place of one that has not come true by then. Of a dict or text the workers
of the next entry are started before. So an entry that comes late enough costs no start
(docs/resizing.md).

*Learning rates*: `lr_rule` applies to all optimizers of ``mindspore.nn`` among `trained`.
``"linear"`` multiplies their rates by the size over the size at the start, ``"sqrt"`` by its root,
a function by its result. The start is the first `begin` with the optimizer. With shards the sizes
are those of the global batch, which the cluster doesn't change.

*Asynchronous*: each worker makes its steps at its own speed. By default that is so if all
optimizers among `trained` are asynchronous (`PairAveragingOptimizer`). The workers meet, each after
its present step, for one of these reasons:

- a change of the cluster;
- an entry of the schedule, which counts once one worker has come to it;
- a checkpoint;
- the end of a call of training.

`ms_kungfu.membership.sync_points` has the argument. At a meeting all take on the step, the epoch
and the position in the data of the worker that is furthest. The first worker at its end ends the
call for all, so call `end` in a loop without `epochs`; the others find `should_stop` true. No two
living workers train the same sample in an epoch. Samples that the slower ones hadn't come to are
left out. So a ledger is rejected, and so is what takes all workers at every step (`policy`,
`monitor`, `wait`). ``asynchronous=False`` has them meet at every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ms_kungfu.elastic.policy import Decision, Metrics, Policies, Policy

if TYPE_CHECKING:
    from ms_kungfu.elastic.differences import consensus
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
