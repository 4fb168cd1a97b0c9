"""Reduce gradients, for optimizers and for custom training cells."""

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
    """Raise ValueError if the number of gradients differs from the number of parameters in the plan."""
    if brought != planned:
        raise ValueError(
            f"got {brought} gradients for {planned} parameters; differentiate with respect to all of the "
            "optimizer's parameters, in the optimizer's order"
        )


# Slices shorten compilation: taking ResNet-50's 161 gradients one by one would add several seconds.
def take(tensors, stretches):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    """Return a tuple that concatenates the ranges [start, stop) of the tuple `tensors`."""
    taken = ()
    for start, stop in stretches:
        taken = taken + tensors[start:stop]
    return taken


def over_a_network() -> bool:
    """Return whether reductions overlap the backward pass by default. The result is the same on all workers."""
    graph, cpu = ms.get_context("mode") == ms.GRAPH_MODE, ms.get_context("device_target") == "CPU"
    return graph and cpu and env.START_HOSTS.get() > 1


class BackgroundReduction(nn.Cell):
    """Start the reduction of each group of gradients, then wait for all reductions.

    A backward pass computes the last gradients first, so the reduction of the last group starts first.
    The first operation has the name ``name/0`` with and without overlap. So if ranks have different
    numbers of groups, or only some ranks overlap, all ranks get an error at the first operation instead
    of waiting forever.
    """

    def __init__(self, plan: Plan, op: str, name: str) -> None:
        super().__init__(auto_prefix=False)
        self.runs = plan.runs()[::-1]
        self.starts = tuple(AllReduceStart(op, f"{name}/{i}") for i in range(len(self.runs)))
        sizes = [len(group.members) for group in plan.groups[::-1]]
        self.wait = AllReduceWait(sizes)
        # For each group, the index of its first result in the list of all results.
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

    Use it in a custom training cell with a plain MindSpore optimizer. For example, such a cell may clip
    gradients after the reduction, accumulate gradients over microbatches, or scale the loss::

        loss, grads = self.value_and_grad(*batch)
        grads = ops.clip_by_global_norm(self.reducer(grads))
        self.optimizer(grads)

    Don't combine the reducer with an optimizer from ms_kungfu, because that optimizer would reduce
    the gradients again. All ranks must pass gradients of the same parameters, in the same order,
    under the same `name`.

    MindSpore's configuration and the ``comm_fusion`` IDs of `parameters` determine which gradients
    are reduced together (docs/fusion.md). Both are read when the reducer is first compiled or
    called, so later changes have no effect.

    Args:
        parameters: the parameters to which the gradients belong, in the same order. Without
            `parameters`, the reducer accepts any gradients and reduces them in one operation. With
            `parameters`, the first reduction raises an error on every rank if the ranks' parameters
            differ and nothing has made them equal.
        mean: whether the result is the mean over the ranks that took part (True), or the sum (False).
        name: the name of the reducer's operations, which must be the same on all ranks.
        fusion: overrides MindSpore's configuration: ``"none"``, ``"auto"`` or ``{"mode": ...,
            "config": ...}``.
        overlap: whether groups are reduced in the background during the backward pass. The value
            must be the same on all ranks. With None, overlap is on only in GRAPH mode on CPUs, if
            there are several groups and the job began on several hosts (docs/overlap.md).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `fusion` or `overlap` is given without `parameters`.
    """

    reduces_gradients = True
    """Marks a cell that reduces gradients. `ms_kungfu.elastic.undo` counts the cells with this attribute."""

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
                raise ValueError("fusion= requires parameters=; pass the model's parameters with parameters=")
        if overlap is not None and not isinstance(overlap, bool):
            raise TypeError(f"overlap must be True, False or None, not {overlap!r}")
        if overlap and parameters is None:
            raise ValueError("overlap= requires parameters=; pass the model's parameters with parameters=")
        self.mean = mean
        self._op = ReduceOp.MEAN if mean else ReduceOp.SUM
        # Create this cell even if it isn't used, because its constructor loads the kernels and joins the cluster. Both
        # should happen before the first step.
        self.all_reduce = AllReduceGradients(self._op, [name])
        self.grouped = parameters is not None
        self.planned_parameters = tuple(parameters or ())
        self._name = name
        self._fusion = fusion
        self._overlap = overlap
        self.rows = SparseReduction()
        self.left_to_shards = False  # True if a `ShardedStep` reduces the gradients instead
        claims.serves(self)
        self.begins_alike = True  # whether the first reduction fails if the ranks' parameters differ

    def leave_to_shards(self, mean: bool = True) -> None:
        """Stop reducing gradients, because a `ShardedStep` reduces them over the shards.

        Args:
            mean: whether the step returns the mean over the shards (True), or the sum (False).

        Raises:
            ValueError: the reducer was created with ``overlap=True``, or for a sum over the workers
                although the step computes a mean.
        """
        self._check_left_to_shards(mean)
        self.left_to_shards = True

    def _check_left_to_shards(self, mean: bool) -> None:
        """Raise the errors of `leave_to_shards`, without changing anything."""
        if self._overlap:
            raise ValueError(
                "overlap=True reduces the gradients during one backward pass, but a step with shards has "
                "several backward passes; omit overlap= with an ElasticDataset(shards=)"
            )
        if mean and not self.mean:
            raise ValueError(
                "gradients_mean=False sums the gradients over the workers, but with "
                "ElasticDataset(shards=) the result must not depend on the number of workers; omit "
                "gradients_mean=False, or also pass it to the ShardedStep to get the sum over the shards"
            )

    def fusion_plan(self) -> Plan:
        """Return the plan: the groups of gradients, and their order.

        To see the plan, ``print`` the result.

        Returns:
            The plan in use. Before the first reduction is compiled or called, it is the plan that
            would be used now.
        """
        return self.__dict__.get("plan") or self._make_plan()

    def _make_plan(self) -> Plan:
        overlaps = self._may_overlap() and not self.left_to_shards
        return plan_of(self.planned_parameters, self._fusion, self._name, overlaps)

    def _may_overlap(self) -> bool:
        """Return whether groups may be reduced during the backward pass: the argument `overlap`, or the default."""
        return over_a_network() if self._overlap is None else self._overlap

    # Python computes a cached property when MindSpore's parser first reads the property; MindSpore would compile a
    # plain property instead. So a program may set its fusion IDs after creating the optimizer, as MindSpore's tutorial
    # does.
    @cached_property
    def plan(self) -> Plan:
        """The plan, which the first use creates from the configuration."""
        if self.begins_alike:
            claims.claim(self.planned_parameters)
        return self._make_plan()

    @cached_property
    def count(self) -> int:
        """The number of gradients in the plan."""
        return len(self.plan.gradients)

    @cached_property
    def grouped_reduction(self) -> AllReduceGradients:
        """The operation that reduces the plan's groups."""
        return AllReduceGradients(self._op, [group.name for group in self.plan.groups], self.plan.group_of())

    @cached_property
    def overlapped(self) -> bool:
        """Whether the groups are reduced in the background."""
        return self._may_overlap() and (self._overlap is not None or len(self.plan.groups) > 1)

    @cached_property
    def background(self) -> BackgroundReduction:
        """The operation that reduces the plan's groups in the background."""
        return BackgroundReduction(self.plan, self._op, self._name)

    # With `ms.jit`, PyNative mode runs the same operations as GRAPH mode.
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce the gradients of a step.

        Args:
            gradients: a tuple of tensors of any shapes and float dtypes.

        Returns:
            A tuple of tensors with the same shapes and dtypes. Each is the mean or the sum of a gradient
            over the ranks that took part. The result is the same at every rank, bit for bit.

        Raises:
            ValueError: the number of gradients differs from the number of parameters.
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
    """Mix-in for MindSpore optimizers: reduce the gradients over all ranks, then call the optimizer.

    List it before the optimizer in the base classes. The reduction comes first, so that parameters and moments
    haven't changed if the reduction fails.
    """

    parameters: Any  # an attribute of MindSpore's optimizer

    def __init__(
        self, *args: Any, gradients_mean: bool = True, fusion: Any = None, overlap: bool | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        hold_last_rate(self)
        self.grad_reducer = KungFuGradReducer(self.parameters, gradients_mean, fusion=fusion, overlap=overlap)

    def fusion_plan(self) -> Plan:
        """Return the plan: the groups of gradients, their sizes and their order.

        To see the plan, ``print`` the result. docs/fusion.md explains the plan.
        """
        return self.grad_reducer.fusion_plan()

    # MindSpore's own `construct` is jitted. In PyNative mode, an override that isn't jitted would run twice
    # (ms_kungfu/ops/_reparse.py).
    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce the gradients over all ranks, and update the parameters.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What MindSpore's optimizer returns.
        """
        # Pass arguments to super(). Without them, MindSpore's parser starts from the object's class and finds this
        # method again.
        return super(Reducing, self).construct(self.grad_reducer(gradients))  # type: ignore[misc]  # noqa: UP008
