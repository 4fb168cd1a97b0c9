"""Callbacks for ``Model.train``.

The callbacks need MindSpore, so each is imported on first use. The following sections describe
`KungFuElasticCallback`.

*Joining and leaving*: before its first step, a joining worker receives all state that decides the
next step. Its `cur_step_num` continues from the other workers' number. Callbacks after this one in
the list also see the other workers' `cur_epoch_num`. It stops after the same step as the other
workers. At a leaving worker the callback calls `request_stop`, so ``Model.train`` returns after
that step. From then on ``ms_kungfu.detached()`` is true, so the program can skip its final work.

*Steps of an epoch*: `batch_num` is the number of steps of the current epoch, as far as it is known.
MindSpore's callbacks name files and steps by ``(cur_step_num - 1) % batch_num + 1``. With this
callback, the result is the step in the epoch, even if earlier epochs had different numbers of
steps. In GRAPH mode a joining worker compiles the training step for its first batch before it
joins.

*Data*: use an `ElasticDataset`. An ordinary dataset isn't partitioned again after a resize: each
worker keeps its initial share. An epoch then has the same number of steps at each worker: the
number that the lowest rank had when training began. A worker whose share is shorter repeats it, and
a worker whose share is longer cuts it. Sink mode is rejected, because it hides the steps from
callbacks.

*Other callbacks*, at any position in the list:

- Only the lowest living rank writes the files of MindSpore's own callbacks. If that rank fails, the
  next rank writes them. These callbacks are `ModelCheckpoint`, `SummaryCollector`,
  `BackupAndRestore`, `OnRequestExit` and `FlopsUtilizationCollector`.
- All other callbacks run at every worker.
- After an epoch, the loss in `net_outputs` is the mean over the workers. So `EarlyStopping` and
  `ReduceLROnPlateau` make the same decision at each worker.
- A joining worker receives the state of MindSpore's own callbacks. A callback of the program
  returns its state from ``state_dict()``, and receives it in ``load_state_dict(state)``.

*Evaluation*: in ``Model.fit`` all workers evaluate together, each with a part of the batches. The
metrics are the same at each worker. ``Model.eval(..., callbacks=[KungFuElasticCallback()])`` does
the same if all workers call it. See `ms_kungfu.callbacks.evaluation`. Before an evaluation, and
after a call of training, the moving statistics are averaged over the workers.
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
