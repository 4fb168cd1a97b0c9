"""Replace ``Model.train``, ``Model.fit`` and ``Model.eval`` in a program that has sharded its datasets for V ranks."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import Any, Callable

import mindspore as ms
import mindspore.dataset as ds
from mindspore.train import Callback, Model

from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.callbacks.sharded import takes_shards
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.msrun import context, loops, pipelines, world
from ms_kungfu.msrun.communication import refused

_log = logging.getLogger(__name__)
# One callback object per model, so that steps are counted across all calls of the model's methods.
_callbacks: weakref.WeakKeyDictionary[Any, KungFuElasticCallback] = weakref.WeakKeyDictionary()


class _Elastic(KungFuElasticCallback):
    _writes = staticmethod(world.writes)


def answer_for(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for ``Model.train`` or ``Model.fit``."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def train(self: Any, *arguments: Any, **named: Any) -> Any:
        call = signature.bind(self, *arguments, **named)
        data = call.arguments.get("train_dataset")
        if not world.begun():
            _log.warning("misuse: check=msrun. The program has not called init(), so this worker trains alone")
            return method(self, *arguments, **named)
        if isinstance(data, ElasticDataset) or not isinstance(data, ds.Dataset):
            return method(self, *arguments, **named)  # the call needs no change
        call.apply_defaults()
        given = call.arguments
        is_plain = takes_shards(self._train_network)
        by_shards = is_plain and ms.get_context("device_target") == "CPU"
        if is_plain and context.parallel_mode() != "data_parallel":
            raise refused(
                "Model.train in parallel_mode stand_alone",
                "the Model's network doesn't reduce gradients; call "
                "set_auto_parallel_context(parallel_mode='data_parallel', "
                "gradients_mean=True) before you create the Model",
            )
        given["train_dataset"] = pipelines.elastic(data, by_shards)
        if isinstance(given.get("valid_dataset"), ds.Dataset) and pipelines.shards_of(given["valid_dataset"]):
            given["valid_dataset"] = pipelines.whole(given["valid_dataset"])
        # The cluster changes between steps, so sink mode, which runs many steps at once, can't be used. On CPUs,
        # MindSpore ignores sink mode in any case.
        given["dataset_sink_mode"] = False
        given["sink_size"] = -1
        if "valid_dataset_sink_mode" in given:
            given["valid_dataset_sink_mode"] = False
        elastic = _callbacks.setdefault(self, _Elastic())
        # This callback comes last, because collectives in the program's own callbacks must run in the step's cluster
        # version.
        given["callbacks"] = [*_listed(given["callbacks"]), elastic]
        if world.rank() == 0:
            _log.info(
                "msrun: rank=%d size=%d global_batch_size=%d sharded=%s",
                world.rank(), world.size(), given["train_dataset"].global_batch_size, by_shards,
            )  # fmt: skip
        return method(*call.args, **call.kwargs)

    return train


def answer_for_eval(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for ``Model.eval``.

    If the dataset is sharded, all ranks take part in the evaluation, each sample is evaluated once, and all ranks get
    the same result. If the dataset isn't sharded, each worker evaluates the whole dataset alone.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def evaluate(self: Any, *arguments: Any, **named: Any) -> Any:
        call = signature.bind(self, *arguments, **named)
        dataset = call.arguments.get("valid_dataset")
        sharded = world.begun() and isinstance(dataset, ds.Dataset) and not isinstance(dataset, ElasticDataset)
        if not sharded or pipelines.shards_of(dataset) is None:
            return method(self, *arguments, **named)
        call.apply_defaults()
        given = call.arguments
        given["valid_dataset"] = pipelines.whole(dataset)
        given["dataset_sink_mode"] = False
        if world.takes_part():
            given["callbacks"] = [KungFuElasticCallback(), *_listed(given["callbacks"])]
        return method(*call.args, **call.kwargs)

    return evaluate


def _listed(callbacks: Any) -> list[Callback]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def answer_for_iterators(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for a dataset's ``create_tuple_iterator`` or ``create_dict_iterator``."""

    @functools.wraps(method)
    def create(self: Any, *arguments: Any, **named: Any) -> Any:
        if not world.begun() or isinstance(self, ElasticDataset):
            return method(self, *arguments, **named)
        if pipelines.shards_of(self) is None:
            own = method(self, *arguments, **named)
            return own if world.size() == 1 else loops.Unsharded(own)

        def make(data: Any) -> Any:
            own = (
                getattr(data, method.__name__) if isinstance(data, ElasticDataset) else functools.partial(method, data)
            )
            return own(*arguments, **named)

        return loops.Loop(self, make)

    return create


def methods() -> dict[str, Callable[..., Any]]:
    """Return the replacements for methods of `Model`, by name."""
    return {
        "train": answer_for(Model.train),
        "fit": answer_for(Model.fit),
        "eval": answer_for_eval(Model.eval),
    }
