"""The reduction of gradients, for optimizers and for training cells of one's own."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.ops import constexpr

from ms_kungfu import env
from ms_kungfu.fusion import Plan, parse
from ms_kungfu.fusion._mindspore import plan_of
from ms_kungfu.ops import ReduceOp
from ms_kungfu.ops._overlap import AllReduceStart, AllReduceWait
from ms_kungfu.ops._reparse import Mended
from ms_kungfu.ops._sparse import SparseReduction
from ms_kungfu.ops.all_reduce import AllReduceGradients
from ms_kungfu.trained import claims
from ms_kungfu.trained.rates import hold_last_rate


@constexpr
def check_count(brought, planned):  # type: ignore[no-untyped-def]  # these are read by MindSpore's parser
    """Raise ValueError unless there are as many gradients as the plan has."""
    if brought != planned:
        raise ValueError(
            f"{brought} gradients were brought for {planned} parameters; differentiate with respect to the optimizer's "
            "parameters, all of them and in their order"
        )


# By slices: a graph of ResNet-50's 161 gradients, taken one by one, took seconds longer to compile.
def take(tensors, stretches):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Return the stretches [start, stop) of a tuple, one after another."""
    taken = ()
    for start, stop in stretches:
        taken = taken + tensors[start:stop]
    return taken


def over_a_network() -> bool:
    """Return whether reductions overlap the backward pass by default.

    The answer is the same at all workers.
    """
    graph, cpu = ms.get_context("mode") == ms.GRAPH_MODE, ms.get_context("device_target") == "CPU"
    return graph and cpu and env.START_HOSTS.get() > 1


class BackgroundReduction(nn.Cell):
    """Start the reduction of each group of gradients, then wait for all of them.

    A backward pass makes the last gradients first, so the last group is started first. Its operation is called
    ``name/0``, as the first one is if nothing overlaps. So ranks that differ in the number of groups, or in whether
    they overlap, detect that at the first one, instead of waiting for each other.
    """

    def __init__(self, plan: Plan, op: str, name: str) -> None:
        super().__init__(auto_prefix=False)
        self.runs = plan.runs()[::-1]
        self.starts = tuple(AllReduceStart(op, f"{name}/{i}") for i in range(len(self.runs)))
        sizes = [len(group.members) for group in plan.groups[::-1]]
        self.wait = AllReduceWait(sizes)
        # Index of each group's first result among all.
        begins = [sum(sizes[:i]) for i in range(len(sizes))][::-1]
        self.places = tuple((begins[g] + start, begins[g] + stop) for g, start, stop in plan.pieces())

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce a tuple of gradients."""
        results = ()
        brought = ()
        tickets = ()
        for i in range(len(self.runs)):
            group = take(gradients, self.runs[i])
            started = self.starts[i](group)
            results = results + started[:-1]
            brought = brought + group
            tickets = tickets + started[-1:]
        return take(self.wait(results + brought + tickets), self.places)


class KungFuGradReducer(nn.Cell):
    """Reduce a tuple of gradients over all ranks, as ``nn.DistributedGradReducer`` does.

    Use it in a training cell with a plain optimizer of MindSpore, if the cell does more than an
    optimizer of ms_kungfu. Examples are clipping after the reduction, accumulation over micro-batches,
    and loss scaling of its own::

        loss, grads = self.value_and_grad(*batch)
        grads = ops.clip_by_global_norm(self.reducer(grads))
        self.optimizer(grads)

    Don't use both: an optimizer of ms_kungfu would reduce again. Every rank brings the same gradients
    in the same order, under the same `name`.

    The ``comm_fusion`` ids of `parameters` and MindSpore's configuration say which gradients are
    reduced together (docs/fusion.md). Both are read when the reducer is first compiled or called, and
    hold from then on.

    Args:
        parameters: those of the gradients, in their order. Without them any gradients are taken, as one
            operation. With them the first reduction is an error at every rank if the ranks begin with
            different parameters and nothing has made them the same.
        mean: whether the result is the mean over the ranks that took part (True), or the sum.
        name: of the operations among the workers.
        fusion: overrides MindSpore's configuration: ``"none"``, ``"auto"`` or ``{"mode": ..., "config":
            ...}``.
        overlap: whether the groups are reduced in the background while the backward pass goes on, the
            same at all ranks. None: in GRAPH mode on CPUs, if there are several groups and the job
            began on several hosts (docs/overlap.md).

    Raises:
        TypeError: for an argument of another type.
        ValueError: for `fusion` or `overlap` without `parameters`.
    """

    reduces_gradients = True  # ms_kungfu.elastic.undo counts the reducers that do
    """That this cell reduces gradients; ms_kungfu.elastic.undo counts the cells that do."""

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
        self.rows = SparseReduction()
        self.left_to_shards = False  # a ShardedStep has summed them
        claims.serves(self)
        self.begins_alike = True  # if the parameters differ between the ranks at first, the first reduction fails

    def leave_to_shards(self, mean: bool = True) -> None:
        """Leave the reduction to a `ShardedStep`, which reduces the gradients over the shards.

        Args:
            mean: whether the step makes the mean over the shards (True), or the sum.

        Raises:
            ValueError: with ``overlap=True``. Also if the reducer was made for the sum over the workers,
                and the step makes a mean.
        """
        if self._overlap:
            raise ValueError(
                "overlap=True reduces the gradients of one backward pass while it goes on, and a step of shards has "
                "several; leave it out with an ElasticDataset(shards=)"
            )
        if mean and not self.mean:
            raise ValueError(
                "gradients_mean=False sums the gradients over the workers, on whose number nothing depends with an "
                "ElasticDataset(shards=); leave it out, or give it to the ShardedStep too, for the sum over the "
                "shards"
            )
        self.left_to_shards = True

    def fusion_plan(self) -> Plan:
        """Return which gradient is in which group, in what order; ``print`` it.

        Returns:
            The plan in use, or what it would be by now.
        """
        return self.__dict__.get("plan") or self._make_plan()

    def _make_plan(self) -> Plan:
        overlaps = self._may_overlap() and not self.left_to_shards
        return plan_of(self.planned_parameters, self._fusion, self._name, overlaps)

    def _may_overlap(self) -> bool:
        """Return whether groups overlap the backward pass, by the argument or by default."""
        return over_a_network() if self._overlap is None else self._overlap

    # Cached, and so evaluated by Python when MindSpore's parser first meets them; a property would be compiled instead.
    # By then a program has set its ids, which it may do after it made the optimizer (MindSpore's tutorial does).
    @cached_property
    def plan(self) -> Plan:
        """Which gradient is in which group; read from the configuration at first use."""
        if self.begins_alike:
            claims.claim(self.planned_parameters)
        return self._make_plan()

    @cached_property
    def count(self) -> int:
        """The number of gradients that the plan has."""
        return len(self.plan.gradients)

    @cached_property
    def grouped_reduction(self) -> AllReduceGradients:
        """The reduction in the plan's groups."""
        return AllReduceGradients(self._op, [group.name for group in self.plan.groups], self.plan.group_of())

    @cached_property
    def overlapped(self) -> bool:
        """Whether the groups are reduced in the background."""
        return self._may_overlap() and (self._overlap is not None or len(self.plan.groups) > 1)

    @cached_property
    def background(self) -> BackgroundReduction:
        """The reduction in the background."""
        return BackgroundReduction(self.plan, self._op, self._name)

    # Jitted, so that PyNative mode knows the same operations as GRAPH mode.
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce the gradients of a step.

        Args:
            gradients: a tuple of tensors of any shapes and float dtypes.

        Returns:
            A tuple of the same shapes and dtypes, each gradient's mean over the ranks that took part, or
            its sum. The bits are the same at every rank.

        Raises:
            ValueError: if there are more or fewer gradients than parameters.
        """
        if self.left_to_shards:
            return gradients
        if self.rows.is_needed(gradients):
            return self.rows.sparse(gradients, self._reduce(self.rows.dense(gradients)))
        return self._reduce(gradients)

    def _reduce(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce dense gradients."""
        if not self.grouped:
            return self.all_reduce(gradients)
        check_count(len(gradients), self.count)
        if self.overlapped:
            return self.background(gradients)
        return self.grouped_reduction(gradients)


class Reducing(Mended):
    """Mix-in before an optimizer of MindSpore: reduce the gradients over all ranks, then let the optimizer update.

    The reduction comes first, so that a failure in it leaves parameters and moments as they were.
    """

    parameters: Any  # of MindSpore's optimizer

    def __init__(
        self, *args: Any, gradients_mean: bool = True, fusion: Any = None, overlap: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        hold_last_rate(self)
        self.grad_reducer = KungFuGradReducer(self.parameters, gradients_mean, fusion=fusion, overlap=overlap)

    def fusion_plan(self) -> Plan:
        """Return which gradients are reduced together, how large and in what order; ``print`` it.

        docs/fusion.md explains the plan.
        """
        return self.grad_reducer.fusion_plan()

    # Jitted, because in PyNative mode a plain override of a jitted method runs twice: see ms_kungfu/ops/_reparse.py.
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce the gradients over all ranks, and update the parameters.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What MindSpore's optimizer returns.
        """
        # To the parser a bare super() is that of the object's class, which leads here again.
        return super(Reducing, self).construct(self.grad_reducer(gradients))  # type: ignore[misc]  # noqa: UP008
