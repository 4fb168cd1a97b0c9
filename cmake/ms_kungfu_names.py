"""Provide the names of KungFu's source-tree integration in MindSpore's modules. Import ms_kungfu only on first use.

This file is installed beside the package. Each Python process of the environment runs ms_kungfu_alias.pth when it
starts. When a program imports one of the modules below, ms_kungfu_alias.pth calls `spec`. Each program with MindSpore
imports `mindspore.nn`, but only a program that uses one of the names imports ms_kungfu.
"""

from functools import partial
from importlib.machinery import PathFinder

MADE = ("mindspore.ops.operations.kungfu_comm_ops", "mindspore.nn.optim.kungfu", "mindspore.train.callback._kungfu")


def spec(name, path):
    """Return the spec of a module of the integration, or of a MindSpore module that contains names of the integration.

    Return None if MindSpore doesn't have the module.
    """
    if name in MADE:
        from ms_kungfu import _alias

        return _alias.spec(name)
    found = PathFinder.find_spec(name, path)
    if found is not None and found.loader is not None:
        found.loader.exec_module = partial(_answer, found.loader.exec_module)
    return found


def _answer(execute, module):
    """Run a MindSpore module with `execute`, then make the integration's names available in the module."""
    execute(module)
    own = vars(module).get("__getattr__")

    def find(name):
        if name.startswith(("KungFu", "kungfu_")):
            try:
                from ms_kungfu import _alias
            except ImportError:  # ms_kungfu was removed, but this file wasn't
                pass
            else:
                value = _alias.of_mindspore(module.__name__, name)
                if value is not None:
                    return value
        if own is not None:
            return own(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = find
