"""Compute checksums of the training state, so that two training runs can be compared."""

from __future__ import annotations

from ms_kungfu.elastic.checkpoint import named_tensors
from ms_kungfu.elastic.differences import checksum
from ms_kungfu.elastic.state import TrainingState


def fingerprint(now: TrainingState) -> dict[str, str]:
    """Return a checksum of each weight, moment, moving statistic, learning rate and buffer.

    The keys are the tensors' names in a checkpoint. Tensors in `averaged=` are left out, because they may differ
    between workers.
    """
    own = {id(tensor) for tensor in now.averaged} - {id(tensor) for tensor in now.statistics}
    return {
        name: checksum(tensor.asnumpy()) for name, tensor in named_tensors(now) if tensor.size and id(tensor) not in own
    }
