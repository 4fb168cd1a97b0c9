"""The reduction of gradients, for optimizers and for training cells of one's own."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import nn

from ms_kungfu.elastic import alike
from ms_kungfu.fusion import Plan, parse
from ms_kungfu.fusion._mindspore import plan_of
from ms_kungfu.ops import ReduceOp
from ms_kungfu.ops.all_reduce import AllReduceGradients
from ms_kungfu.optimizers._background import BackgroundReduction
from ms_kungfu.optimizers._grouping import check_count


class KungFuGradReducer(nn.Cell):
    """Reduce a tuple of gradients over all ranks, as ``nn.DistributedGradReducer`` does.

    Takes a tuple of tensors (gradients of any shapes and float dtypes) and returns the same with each one's mean over
    the ranks that took part, or its sum with ``mean=False``, with the same bits at every rank.

    Use it in a training cell with a plain optimizer of MindSpore, where more is to be done than an optimizer of
    ms_kungfu does: clipping after the reduction, accumulation over micro-batches, loss scaling of one's own::

        loss, grads = self.value_and_grad(*batch)
        grads = ops.clip_by_global_norm(self.reducer(grads))
        self.optimizer(grads)

    Not both: an optimizer of ms_kungfu would reduce again. Every rank brings the same gradients in the same order,
    under the same `name`.

    `parameters` are those of the gradients, in their order. Their ``comm_fusion`` ids and MindSpore's configuration say
    which gradients are reduced together (docs/fusion.md); `fusion` overrides the configuration with ``"none"``,
    ``"auto"`` or ``{"mode": ..., "config": ...}``. Both are read when the reducer is first compiled or called, and hold
    from then on. Without `parameters` any gradients are taken, as one operation. With them the first reduction is an
    error at every rank where the ranks begin with different parameters and nothing has made them the same.

    `overlap` says whether the groups are reduced in the background while the backward pass goes on (docs/overlap.md);
    it has to be the same at all ranks.
    """

    reduces_gradients = True  # ms_kungfu.elastic.undo counts those that do

    def __init__(
        self,
        parameters: Any = None,
        mean: bool = True,
        name: str = "gradients",
        fusion: Any = None,
        overlap: bool | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        if not isinstance(mean, bool):
            raise TypeError(f"mean must be True (average) or False (sum), not {mean!r}")
        if fusion is not None:
            parse(fusion)
            if parameters is None:
                raise ValueError("fusion groups are made of parameters; give the reducer the parameters too")
        if overlap is not None and not isinstance(overlap, bool):
            raise TypeError(f"overlap must be True, False or None, not {overlap!r}")
        if overlap and parameters is None:
            raise ValueError("groups of parameters are what overlaps; give the reducer the parameters too")
        self.mean = mean
        self._op = ReduceOp.MEAN if mean else ReduceOp.SUM
        # In any case: it loads the kernels and joins the cluster now, rather than in the first step.
        self.all_reduce = AllReduceGradients(self._op, [name])
        self.grouped = parameters is not None
        self.planned_parameters = tuple(parameters or ())
        self._name = name
        self._fusion = fusion
        self._overlap = overlap
        self.begins_alike = True  # where the parameters differ between the ranks at first, the first reduction fails

    def fusion_plan(self) -> Plan:
        """Which gradient is in which group, in what order: the plan in use, or what it would be by now.

        ``print`` it.
        """
        return self.__dict__.get("plan") or plan_of(self.planned_parameters, self._fusion, self._name)

    # Cached, and so evaluated by Python when MindSpore's parser first meets them; a property would be compiled instead.
    # By then a program has set its ids, which it may do after it made the optimizer (MindSpore's tutorial does).
    @cached_property
    def plan(self) -> Plan:
        if self.begins_alike:
            alike.claim(self.planned_parameters)
        return plan_of(self.planned_parameters, self._fusion, self._name)

    @cached_property
    def count(self) -> int:
        return len(self.plan.gradients)

    @cached_property
    def grouped_reduction(self) -> AllReduceGradients:
        return AllReduceGradients(self._op, [group.name for group in self.plan.groups], self.plan.group_of())

    @cached_property
    def overlapped(self) -> bool:
        return bool(self._overlap)

    @cached_property
    def background(self) -> BackgroundReduction:
        return BackgroundReduction(self.plan, self._op, self._name)

    # Jitted, so that PyNative mode knows the same operations as GRAPH mode.
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        if not self.grouped:
            return self.all_reduce(gradients)
        check_count(len(gradients), self.count)
        if self.overlapped:
            return self.background(gradients)
        return self.grouped_reduction(gradients)
