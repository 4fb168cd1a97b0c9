"""Switch MindSpore's compile cache off in a worker.

The cache ignores the shapes of a graph's inputs, and all ranks use the folder ``rank_0`` in the cache's path. So a
worker might load a graph for a different batch size, and would then silently compute wrong weights, or NaN.

1. MindSpore reads the environment (``MS_COMPILER_CACHE_ENABLE``) only while its context's ``enable_compile_cache`` is
   unset. So if the context's value is False, the environment variable has no effect, even if the program sets it later.
2. ``set_context`` writes the context through the method ``set_param`` of the only `_Context` object. This module
   replaces that method, so if the program calls ``set_context`` later, the cache stays off.
3. `kungfu-run` removes the variable from a worker's environment, so the cache is off even before this module is
   imported.

tests/mindspore/test_loading_and_arguments.py and tests/unit/test_environment_of_workers.py test these three points.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from mindspore import context
from mindspore._c_expression import ms_ctx_param

from ms_kungfu import _logging, env, membership, runtime

_log = logging.getLogger(__name__)


def keep_off() -> None:
    """Switch the compile cache off for the rest of the process, and log once if the program had switched it on."""
    parameter = getattr(ms_ctx_param, "enable_compile_cache", None)
    if parameter is None:
        return
    stock: Any = context._context()
    if "set_param" in vars(stock):
        return
    told = False

    def tell(setting: str) -> None:
        nonlocal told
        if not told and membership.rank() == 0:
            _logging.set_up(membership.rank)
            _log.warning(
                'compile cache: off in workers setting="%s" reason="ranks share the cache, which ignores batch shapes"',
                setting,
            )
        told = True

    own = stock.set_param

    def set_param(name: Any, value: Any) -> None:
        if name != parameter:
            own(name, value)
            return
        if value > 0:
            tell("set_context(enable_compile_cache=True)")
        stock.enable_compile_cache = False
        own(parameter, 0)

    wanted = stock.enable_compile_cache
    stock.set_param = set_param
    if wanted is None and os.environ.get("MS_COMPILER_CACHE_ENABLE") == "1":
        tell(f"{env.COMPILE_CACHE}=1")
    set_param(parameter, int(bool(wanted)))


if runtime.using_kungfu():
    keep_off()
