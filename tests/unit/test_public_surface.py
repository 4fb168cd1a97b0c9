"""What users import goes on being there, with the same arguments.

`public_surface.txt` lists it. A developer that adds something runs

    python -m tests.unit.test_public_surface > tests/unit/public_surface.txt

and reads the difference: a line that is gone, or that has changed, is a user's program that breaks.
"""

import importlib
import inspect
from pathlib import Path

import pytest

LISTED = Path(__file__).with_name("public_surface.txt")
# `comm` and `errors` have no `__all__`: there it is their own functions and classes.
MODULES = (
    "ms_kungfu", "ms_kungfu.callbacks", "ms_kungfu.comm", "ms_kungfu.dataset", "ms_kungfu.elastic", "ms_kungfu.errors",
    "ms_kungfu.fusion", "ms_kungfu.monitoring", "ms_kungfu.nn", "ms_kungfu.ops", "ms_kungfu.optimizers",
    "ms_kungfu.ray",
)  # fmt: skip


def signature(function):
    found = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=found.empty))


def described(name, item):
    """Lines of one name: a class is its constructor and the public names of its own and of our classes below it."""
    if inspect.isclass(item):
        ours = [cls for cls in item.__mro__ if cls.__module__.startswith("ms_kungfu")]
        has_own = any("__init__" in vars(cls) or "__new__" in vars(cls) for cls in ours)
        yield f"{name}{signature(item.__init__) if has_own else ''}"
        members = {}
        for cls in reversed(ours):
            members.update({key: value for key, value in vars(cls).items() if not key.startswith("_")})
        for key, value in sorted(members.items()):
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            yield f"{name}.{key}{signature(function) if inspect.isfunction(function) else ''}"
    elif inspect.isroutine(item):
        yield f"{name}{signature(item)}"
    else:
        yield name


def surface():
    lines = []
    for path in MODULES:
        module = importlib.import_module(path)
        names = getattr(module, "__all__", None) or [
            name
            for name, item in vars(module).items()
            if not name.startswith("_") and inspect.getmodule(item) is module and callable(item)
        ]
        for name in sorted(names):
            lines.extend(described(f"{path}.{name}", getattr(module, name)))
    return lines


def test_public_names_and_their_arguments_stay():
    pytest.importorskip("mindspore")
    present = surface()
    gone = [line for line in LISTED.read_text().splitlines() if line not in present]
    assert gone == [], "these were public"


def test_new_public_name_is_listed():
    pytest.importorskip("mindspore")
    listed = LISTED.read_text().splitlines()
    assert [line for line in surface() if line not in listed] == [], f"list it: {__doc__}"


def test_programs_evict_by_a_public_name():
    from ms_kungfu import elastic, membership

    assert elastic.evict is membership.evict


if __name__ == "__main__":
    print("\n".join(surface()))
