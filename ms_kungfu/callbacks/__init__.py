"""Callbacks for ``Model.train``.

They load on first use, since they need MindSpore. The rest of this text is about
`KungFuElasticCallback`.

*Joining and leaving*: a joining worker receives everything that decides the next step before its
own first one. It goes on with the others' `cur_step_num` and, in callbacks that come after this
one, `cur_epoch_num`. It stops after the same step as they do. At a leaving worker `request_stop` is
called: its ``Model.train`` returns after that step as it always does. From then on
``ms_kungfu.detached()`` is true, so that a program can leave out what it does at the end.

*Steps of an epoch*: `batch_num` is the steps of the present epoch, as far as they are known.
MindSpore's callbacks name files and steps by ``(cur_step_num - 1) % batch_num + 1``. That is the
step in the epoch, whatever the epochs before had. In GRAPH mode a joining worker compiles the
training step for its first batch before the others wait for it.

*Data*: give it an `ElasticDataset`. An ordinary dataset is not partitioned again, and each worker
keeps the share that it began with. Its epochs have as many steps at each worker as at the lowest
rank when training began. A shorter share begins again, a longer one is cut. Sink mode hides the
steps from callbacks and is rejected.

*Other callbacks*, wherever they stand in the list: the lowest living rank alone writes the files of
MindSpore's own. The next one goes on if it fails. These are `ModelCheckpoint`, `SummaryCollector`,
`BackupAndRestore`, `OnRequestExit` and `FlopsUtilizationCollector`. All others run at every worker.
After an epoch the loss in `net_outputs` is the mean over the workers, so `EarlyStopping` and
`ReduceLROnPlateau` decide alike at each. A joining worker receives the state of MindSpore's own
callbacks. Of the program's own it receives what they return from ``state_dict()`` and take in
``load_state_dict(state)``.

*Evaluation*: all workers evaluate together in ``Model.fit``, each with a part of the batches. The
numbers are the same at each. So they do in ``Model.eval(...,
callbacks=[KungFuElasticCallback()])``, which all workers then call. See
`ms_kungfu.callbacks.evaluation`. It begins with the mean of the moving statistics over the workers,
as does what follows a call of training.
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
