"""Make `net_outputs` the same on all workers at the end of an epoch, even on a worker that ran no step of the epoch."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np

from ms_kungfu.agreement import broadcast_json
from ms_kungfu.callbacks.codec import pack, unpack
from ms_kungfu.callbacks.evaluation import gather
from ms_kungfu.callbacks.monitor import batch_rows
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import state_transfer
from ms_kungfu.elastic.training import ElasticTraining


class EpochOutputs:
    """The `net_outputs` at the end of an epoch, for one `KungFuElasticCallback`."""

    def __init__(self) -> None:
        self.kept: Any = None
        """The packed outputs of an epoch's last step, if a checkpoint follows that step; otherwise None."""

    def keep(self, training: ElasticTraining, params: Any) -> None:
        """Keep the outputs of an epoch's last step. All workers call this before a checkpoint after that step.

        A worker that resumes from that checkpoint runs no step of the epoch, but its callbacks need the outputs.
        """
        self.kept, data = None, params.train_dataset
        if training.asynchronous or not isinstance(data, ElasticDataset) or data.steps < data.get_dataset_size():
            return
        own = params.get("net_outputs")
        agree_on_outputs(params, batch_rows(params))
        agreed, params.net_outputs = params.get("net_outputs"), own  # other callbacks of this step use `own`
        # Some outputs can't be packed, for example sparse tensors. A worker that resumes here then skips the end of the
        # epoch.
        with suppress(TypeError):
            self.kept = pack(agreed)

    def end_epoch(self, training: ElasticTraining | None, params: Any) -> None:
        """End an epoch. In synchronous training, all workers must call this.

        `training`: None if this worker doesn't take part in training.
        """
        if training is not None and params.get("net_outputs") is None and self.kept is not None:
            params.net_outputs = unpack(self.kept)  # this worker has resumed from a checkpoint after the last step
        self.kept = None
        if training is not None and not training.asynchronous:
            agree_on_outputs(params, batch_rows(params))
        params.setdefault("net_outputs", None)


def agree_on_outputs(params: Any, rows: int) -> None:
    """Make `net_outputs` the same on all workers. All workers must call this after the last step of an epoch.

    The loss is the only or the first output, and has one element. Its new value is the mean over the workers, weighted
    by the number of samples in each worker's last batch. A worker that joined after the epoch's last step receives all
    outputs of the lowest rank that ran this step. If all ranks that ran the step have failed, such a worker has no
    outputs.
    """
    outputs = params.get("net_outputs")
    first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    loss = None
    if isinstance(first, ms.Tensor) and first.size == 1:
        loss = float((first.astype(ms.float32) if first.dtype == ms.bfloat16 else first).asnumpy().ravel()[0])
    told = gather({"has": outputs is not None, "loss": loss, "rows": rows})
    if not all(row["has"] for row in told.values()) and any(row["has"] for row in told.values()):
        try:
            told_outputs = partial(broadcast_json, lambda: pack(outputs))
            received = state_transfer.from_lowest_rank(told_outputs, able=outputs is not None)
        except state_transfer.StateLostError:
            return  # this worker has the training state, but continues without the outputs of the last step
        if outputs is None:
            outputs = params.net_outputs = unpack(received)
            first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
    having = [row for row in told.values() if row["has"]]
    if not having or any(row["loss"] is None for row in having):
        return
    weights = [max(row["rows"], 1) for row in having]
    mean = sum(row["loss"] * weight for row, weight in zip(having, weights)) / sum(weights)
    agreed = ms.Tensor(np.full(first.shape, mean), dtype=first.dtype)
    params.net_outputs = type(outputs)([agreed, *outputs[1:]]) if isinstance(outputs, (tuple, list)) else agreed
