"""Names of KungFu's source-tree integration in MindSpore's own modules, without ms_kungfu until one is asked for.

It stands alone beside the installed package: ms_kungfu_alias.pth, which each Python of the environment runs as it
starts, asks `spec` for the modules below once a program imports them. Each program with MindSpore imports
`mindspore.nn`; one that never asks for such a name never imports ms_kungfu.
"""

from functools import partial
from importlib.machinery import PathFinder

MADE = ("mindspore.ops.operations.kungfu_comm_ops", "mindspore.nn.optim.kungfu", "mindspore.train.callback._kungfu")


def spec(name, path):
    """What an import of a module of the integration, or of one of MindSpore's in which it had names, is answered with;
    None where MindSpore hasn't that."""
    if name in MADE:
        from ms_kungfu import _alias

        return _alias.spec(name)
    found = PathFinder.find_spec(name, path)
    if found is not None and found.loader is not None:
        found.loader.exec_module = partial(_answer, found.loader.exec_module)
    return found


def _answer(execute, module):
    """Run a module of MindSpore's by `execute`, then have it answer for the integration's names."""
    execute(module)
    own = vars(module).get("__getattr__")

    def find(name):
        if name.startswith(("KungFu", "kungfu_")):
            try:
                from ms_kungfu import _alias
            except ImportError:  # gone, but for the file beside it
                pass
            else:
                value = _alias.of_mindspore(module.__name__, name)
                if value is not None:
                    return value
        if own is not None:
            return own(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = find
