"""Callbacks for ``Model.train``.

The callbacks need MindSpore, so the package imports each callback only on first use. The following
sections describe `KungFuElasticCallback`.

*Joining and leaving*: before its first step, a joining worker receives all state on which the next
step depends. Its `cur_step_num` continues from the other workers' number. Callbacks that follow
`KungFuElasticCallback` in the list also see the other workers' `cur_epoch_num`. A joining worker
stops after the same step as the other workers. On a leaving worker, the callback calls
`request_stop`, so ``Model.train`` returns after the current step. From then on
``ms_kungfu.detached()`` is true, so the program can skip its final work.

*Steps in an epoch*: `batch_num` is the number of steps in the current epoch, as far as it is known.
MindSpore's callbacks name files and steps by ``(cur_step_num - 1) % batch_num + 1``. With
`KungFuElasticCallback`, the result is the step's number in its epoch, even if earlier epochs had
different numbers of steps. In GRAPH mode, a joining worker compiles the training step for the shape
of its first batch before it joins.

*Data*: use an `ElasticDataset`. An ordinary dataset isn't partitioned again after a resize, and
each worker keeps its initial share. An epoch then has as many steps on each worker as it had on the
lowest rank when training began. If a worker's share has fewer steps, the worker repeats its share.
If the share has more steps, the worker skips the rest. Sink mode is rejected, because it hides the
steps from callbacks.

*Other callbacks* follow these rules, at any position in the list:

- Only the lowest living rank writes the files of MindSpore's own callbacks. If that rank fails, the
  next rank writes them. These callbacks are `ModelCheckpoint`, `SummaryCollector`,
  `BackupAndRestore`, `OnRequestExit` and `FlopsUtilizationCollector`.
- All other callbacks run on every worker.
- After an epoch, the loss in `net_outputs` is the mean over the workers, so `EarlyStopping` and
  `ReduceLROnPlateau` make the same decision on each worker.
- A joining worker receives the state of MindSpore's own callbacks. If a callback in the program has
  state, it must return the state from ``state_dict()`` and receive it in
  ``load_state_dict(state)``.

*Evaluation*: in ``Model.fit`` all workers evaluate together, and each evaluates a part of the
batches. The metrics are the same on each worker. ``Model.eval(...,
callbacks=[KungFuElasticCallback()])`` does the same if all workers make this call. See
`ms_kungfu.callbacks.evaluation`. The moving statistics are averaged over the workers before an
evaluation, and when ``Model.train`` ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_kungfu.callbacks.broadcast import BroadcastCallback, sync_net_parameters
    from ms_kungfu.callbacks.elastic import KungFuElasticCallback
    from ms_kungfu.callbacks.monitor import MonitorCallback

__all__ = ["BroadcastCallback", "KungFuElasticCallback", "MonitorCallback", "sync_net_parameters"]


def __getattr__(name: str) -> Any:
    if name == "KungFuElasticCallback":
        from ms_kungfu.callbacks.elastic import KungFuElasticCallback

        return KungFuElasticCallback
    if name == "MonitorCallback":
        from ms_kungfu.callbacks.monitor import MonitorCallback

        return MonitorCallback
    if name in ("BroadcastCallback", "sync_net_parameters"):
        from ms_kungfu.callbacks import broadcast

        return getattr(broadcast, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
