"""Replace some of MindSpore's functions and classes in the program's process.

MindSpore's files aren't changed. MindSpore's own modules still use the original functions, except for the few functions
that make a training step data parallel.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_COMMUNICATION = ("mindspore.communication", "mindspore.communication.management")
_CONTEXT = ("mindspore", "mindspore.context")
_PRIMITIVES = ("mindspore.ops", "mindspore.ops.operations", "mindspore.ops.operations.comm_ops")
_given = False


def give() -> None:
    """Replace MindSpore's functions. `hook` calls this function as soon as MindSpore has been imported."""
    global _given
    if _given:
        return
    _given = True
    communication, context = import_module("ms_kungfu.msrun.communication"), import_module("ms_kungfu.msrun.context")
    reducers, training = import_module("ms_kungfu.msrun.reducers"), import_module("ms_kungfu.msrun.training")
    own_functions = _functions(communication)
    _put(_COMMUNICATION, {
        **own_functions,
        "get_local_rank": own_functions["get_rank"],  # the virtual world has one host
        "get_local_rank_size": own_functions["get_group_size"],
    })  # fmt: skip
    _put(_CONTEXT, {
        name: getattr(context, name)
        for name in ("set_auto_parallel_context", "get_auto_parallel_context", "reset_auto_parallel_context")
    })  # fmt: skip
    # TrainOneStepCell uses these settings to create its reducer.
    _put(("mindspore.nn.wrap.cell_wrapper",), {
        "_get_parallel_mode": context.parallel_mode,
        "_get_gradients_mean": context.gradients_mean,
        "_get_device_num": context.device_num,
    })  # fmt: skip
    nets = ("mindspore.nn", "mindspore.nn.wrap", "mindspore.nn.wrap.grad_reducer", "mindspore.nn.wrap.cell_wrapper")
    _put(nets, {"DistributedGradReducer": reducers.DistributedGradReducer})
    _put(_PRIMITIVES, {"AllReduce": reducers.AllReduce, "Broadcast": reducers.Broadcast})
    _put(_PRIMITIVES, {
        name: communication.refusing(f"ops.{name}", why) for name, why in reducers.REFUSED_PRIMITIVES.items()
    })  # fmt: skip
    functions = sys.modules["mindspore.communication.comm_func"]
    _put((functions.__name__,), {
        **reducers.refused_functions(functions),
        "all_reduce": reducers.all_reduce,
        "broadcast": reducers.broadcast,
        "barrier": reducers.barrier,
    })  # fmt: skip
    for name, relative in (("mint.distributed", "mint.distributed.distributed"), ("ops.communication", "ops")):
        _give_process_groups(f"mindspore.{name}", f"mindspore.{relative}", communication)
    import_module("mindspore.parallel.auto_parallel")  # MindSpore doesn't import this module automatically
    _put(("mindspore.parallel.auto_parallel",), {
        "AutoParallel": communication.refusing(
            "AutoParallel", "it divides models among devices, but only data parallelism is supported"
        )
    })  # fmt: skip
    model, dataset = sys.modules["mindspore.train.model"].Model, sys.modules["mindspore.dataset"].Dataset
    for name, method in training.methods().items():
        setattr(model, name, method)
    for name in ("create_tuple_iterator", "create_dict_iterator"):
        setattr(dataset, name, training.answer_for_iterators(getattr(dataset, name)))
    batches, composite = import_module("ms_kungfu.msrun.rank_batches"), sys.modules["mindspore.ops.composite.base"]
    for kind in (composite.GradOperation, composite._Grad):
        kind.__call__ = batches.answer_for_gradients(kind.__call__)
    jit = batches.answer_for_jit(sys.modules["mindspore"].jit)
    _put(("mindspore", "mindspore.common", "mindspore.common.api"), {"jit": jit})
    step = sys.modules["mindspore.nn"].TrainOneStepCell
    step.__call__ = batches.answer_for_train_cells(step.__call__)
    cell = sys.modules["mindspore.nn"].Cell
    cell.compile_and_run = batches.answer_for_cells(cell.compile_and_run)
    cell.__init__ = import_module("ms_kungfu.msrun.cells").noting(cell.__init__)


def _functions(communication: ModuleType) -> dict[str, Any]:
    names = (
        "init release get_rank get_group_size get_world_rank_from_group_rank get_group_rank_from_world_rank "
        "create_group destroy_group get_process_group_ranks get_comm_name"
    )
    return {name: getattr(communication, name) for name in names.split()}


def _give_process_groups(name: str, relative: str, communication: ModuleType) -> None:
    """Replace the functions in `__all__` of the module `name`, which have the names of torch's functions.

    Also replace them in the module `relative` if it has the same functions.
    """
    module = sys.modules.get(name)
    for each in getattr(module, "__all__", ()):
        stock, ours = getattr(module, each), communication.of_process_groups(name, each)
        if getattr(sys.modules[relative], each, None) is stock:
            setattr(sys.modules[relative], each, ours)
        setattr(module, each, ours)


def _put(modules: tuple[str, ...], names: dict[str, Any]) -> None:
    """Replace each name in those modules that have it. MindSpore's versions have different names."""
    for module in modules:
        found = sys.modules.get(module)
        for name, value in names.items():
            if found is not None and hasattr(found, name):
                setattr(found, name, value)
