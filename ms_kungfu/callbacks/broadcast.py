"""Start training on all workers with one worker's parameters."""

from __future__ import annotations

from typing import Any

from mindspore.train import Callback

from ms_kungfu import membership, runtime
from ms_kungfu.callbacks.elastic import KungFuElasticCallback
from ms_kungfu.elastic.program import is_behind, is_resuming
from ms_kungfu.elastic.state_transfer import share_parameters
from ms_kungfu.trained.inventory import collect_parameters


def sync_net_parameters(net: Any, root: int = 0) -> None:
    """Copy the root rank's Parameters into every worker's Parameters, in place.

    All workers must call the function. A second call changes nothing. If the other workers use
    `KungFuElasticCallback` or `ElasticTraining`, the function returns immediately on a joining
    worker, which receives the whole training state later.

    Args:
        net: a cell, an optimizer or a list of Parameters.
        root: the rank whose Parameters are sent.

    Raises:
        ValueError: `root` isn't a rank in the cluster.
    """
    root = _checked(root)
    if not is_behind():
        share_parameters(collect_parameters([net]), root)


class BroadcastCallback(Callback):
    """Start training on every worker with the weights and the optimizer state of `root`.

    Use it in clusters that don't change. If the program also uses a `KungFuElasticCallback`, this
    callback affects only the workers with which the job starts. Joining workers receive the state from
    the `KungFuElasticCallback`.

    Args:
        root: the rank whose state is sent.

    Raises:
        ValueError: `root` isn't a rank in the cluster.
    """

    def __init__(self, root: int = 0) -> None:
        super().__init__()
        self._root = _checked(root)

    def on_train_begin(self, run_context: Any) -> None:
        """Copy the root's weights and optimizer state to every worker.

        Args:
            run_context: the context that MindSpore passes.
        """
        params = run_context.original_args()
        # A worker whose join is deferred joins in the elastic callback, as soon as it is ready to train, and then
        # receives all state.
        joins_later = membership.is_deferred() and any(
            isinstance(c, KungFuElasticCallback) for c in params.list_callback
        )
        if not is_resuming() and not joins_later:
            share_parameters(collect_parameters([params.train_network]), self._root)


def _checked(root: int) -> int:
    size = runtime.current_cluster_size()
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < size:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, got {root!r}")
    return root
