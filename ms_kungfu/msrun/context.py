"""Replace ``set_auto_parallel_context`` and related functions, and store the settings in this module."""

from __future__ import annotations

from typing import Any, Callable

from mindspore import context as stock

from ms_kungfu.msrun import world
from ms_kungfu.msrun.communication import refused

_MODES = ("stand_alone", "data_parallel")
_DEFAULTS: dict[str, Any] = {
    "parallel_mode": "stand_alone",
    "gradients_mean": False,
    "parameter_broadcast": False,
    "device_num": None,  # this is always V
    "global_rank": None,
}
_OWN = ("comm_fusion", "all_reduce_fusion_config")  # MindSpore's own settings that are supported here
# Settings that are accepted only with these values, which have no effect.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "enable_parallel_optimizer": (False,),
    "pipeline_stages": (1,),
    "full_batch": (False,),
    "auto_parallel_search_mode": ("recursive_programming",),
    "search_mode": ("recursive_programming",),
    "strategy_ckpt_load_file": ("",),
    "strategy_ckpt_save_file": ("",),
    "gradient_fp32_sync": (True,),
    "loss_repeated_mean": (True,),
    "enable_alltoall": (False,),
    "dataset_strategy": ("data_parallel",),
}
_set: dict[str, Any] = dict(_DEFAULTS)
_stock_set: Callable[..., None] = stock.set_auto_parallel_context
_stock_get: Callable[[str], Any] = stock.get_auto_parallel_context
_stock_reset: Callable[[], None] = stock.reset_auto_parallel_context


def set_auto_parallel_context(**settings: Any) -> None:
    """Change the given settings. If one setting is rejected, change no setting."""
    for name, value in settings.items():
        _check(name, value)
    _set.update({name: value for name, value in settings.items() if name in _DEFAULTS})
    own = {name: value for name, value in settings.items() if name in _OWN}
    if own:
        _stock_set(**own)


def _check(name: str, value: Any) -> None:
    if name == "parallel_mode" and value not in _MODES:
        raise refused(f"parallel_mode={value!r}", "only data_parallel supports a changing number of workers")
    if name in ("gradients_mean", "parameter_broadcast") and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    if name == "device_num" and value != world.size():
        raise ValueError(f"device_num={value!r} differs from -msrun-size, which sets {world.size()} ranks")
    if name == "global_rank" and value != world.rank():
        raise ValueError(f"global_rank={value!r} differs from get_rank(), which is {world.rank()}")
    if name not in _DEFAULTS and name not in _OWN and value not in _NOTHING.get(name, ()):
        raise refused(
            f"set_auto_parallel_context({name}={value!r})",
            "it is for models that are divided among devices, but only data parallelism is supported",
        )


def get_auto_parallel_context(attr_key: str) -> Any:
    """Return a setting from this module, or from MindSpore if this module doesn't store the setting."""
    if attr_key in ("device_num", "global_rank"):
        return device_num() if attr_key == "device_num" else world.rank()
    return _set[attr_key] if attr_key in _set else _stock_get(attr_key)


def reset_auto_parallel_context() -> None:
    _set.update(_DEFAULTS)
    _stock_reset()


def parallel_mode() -> str:
    """Return the parallel mode that `TrainOneStepCell` uses to create its reducer."""
    return str(_set["parallel_mode"])


def gradients_mean() -> bool:
    return bool(_set["gradients_mean"])


def device_num() -> int:
    return world.size() if world.begun() else 1
