"""Run one worker's share of a sharded step. This module contains the code of `ShardedStep` that needs no MindSpore.

ops_src/shards/step.h explains why the exact results don't depend on the cluster size, and what happens after a failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ms_kungfu import membership, runtime
from ms_kungfu.comm import Array
from ms_kungfu.elastic.determinism_probe import LOSS, DeterminismProbe
from ms_kungfu.elastic.straggler_weights import StragglerWeights
from ms_kungfu.trained import claims

if TYPE_CHECKING:
    from ms_kungfu.dataset.batches import ShardBatches

_DTYPES = ("Float16", "BFloat16", "Float32", "Float64")
_ON_CORES = "computed on {} cores per worker (kungfu-run -cores-per-worker K gives each worker the same number)"


class ShardLoop:
    """The loop over the shards in one `ShardedStep`.

    Args:
        parameters: the trained Parameters.
        mean: whether the update receives the mean of the gradients over the shards of the step, rather than their sum.
        dtypes: a function that returns the dtypes of the gradients, followed by the dtype of the loss. It is called
            after a shard has been computed. An empty result means that all dtypes are the same.
        shapes: a function that returns the number of different shard shapes that this worker has computed.
    """

    def __init__(
        self, parameters: Sequence[Any], mean: bool, dtypes: Callable[[], Sequence[str]] = tuple,
        shapes: Callable[[], int] = int,
    ) -> None:  # fmt: skip
        self._parameters, self._mean, self._dtypes, self._shapes = parameters, mean, dtypes, shapes
        self._claimed = False
        self._determinism_probe, self._pace = DeterminismProbe(), StragglerWeights()

    def step(
        self,
        batches: ShardBatches,
        compute: Callable[[int], tuple[Any, bool]],
        statistics: Callable[[], list[Array]] = list,
    ) -> Any:
        """Run one step and return its loss over all shards (collective).

        ``compute(shard)`` computes a shard and contributes its gradients. If all shards of the step have then
        contributed, ``compute`` also updates the Parameters. ``compute`` returns the loss, a scalar tensor, and whether
        the Parameters were updated. `statistics` returns the arrays of the moving statistics, which `compute` changes.
        """
        core = membership.current().core
        if not self._claimed:
            membership.fix_cores()
            membership.let_wakers_go_on()
            claims.claim(self._parameters)
            self._claimed = True
        seed, step = batches.next_key()
        shapes = self._shapes()
        core.begin_sharded_step(
            batches.count, batches.last_share, self._mean, batches.weights, seed, step, statistics()
        )
        try:
            batches.check_deal(core.missing_shards())
            self._determinism_probe.look(
                runtime.cluster_version(), batches.check, compute, self._names, batches.conditions
            )
            with claims.claiming(f"{_ON_CORES.format(membership.core_count())}, "):
                loss = self._make(core, batches.first, compute)
        finally:
            core.end_sharded_step()
        if not self._mean:
            loss = loss / (batches.count - 1 + batches.last_share)  # the loss is a sum over the shards
        batches.made()
        where = runtime.cluster_version(), runtime.current_cluster_size()
        is_like_before = self._shapes() == shapes
        batches.weigh(self._pace.step_end(*where, batches.count, batches.next_weights, is_like_before))
        return loss

    @staticmethod
    def _make(core: Any, first: int, compute: Callable[[int], tuple[Any, bool]]) -> Any:
        while True:
            if missing := core.missing_shards():
                core.take_shard(missing[0])
                loss, over = compute(missing[0])
            else:  # no shard is assigned to this worker
                core.take_no_shard()
                loss, over = compute(first)
            if over:
                return loss

    def _names(self, count: int) -> list[str]:
        """Return the names of the gradients and of the loss, in the order in which their hashes are stored.

        The hashes are grouped by dtype (kernels/common/groups.h).
        """
        if len(self._parameters) + 1 == count:
            names = [f"the gradient of {p.name!r}" for p in self._parameters]
        else:
            names = [f"gradient {i}" for i in range(count - 1)]
        kinds = [_DTYPES.index(dtype) for dtype in self._dtypes()] or [0] * count
        assert len(kinds) == count
        return [name for _, name in sorted(zip(kinds, [*names, LOSS]), key=lambda each: each[0])]
