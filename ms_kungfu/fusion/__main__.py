"""``python -m ms_kungfu.fusion``: print which gradients are reduced together, their sizes and their order."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from ms_kungfu._processes import printing
from ms_kungfu.fusion.mode import AUTO, Mode, parse
from ms_kungfu.fusion.plan import Gradient, Plan, make_plan
from ms_kungfu.fusion.shapes import GRADIENTS

_TARGETS = f"""\
TARGET is one of
  program.py [ARGUMENT ...]  run the program as one worker until it compiles its first training step
  module:function, program.py:function
                             call the function, which returns a network, an optimizer or a list of parameters
  {", ".join(GRADIENTS)}
                             a well-known model, in float32
"""


def _fusion(text: str) -> Any:
    """Convert the option's text to a value that the optimizers accept."""
    mode, colon, config = text.partition(":")
    try:
        value: Any = text
        if colon:
            value = {"mode": mode, "config": json.loads(f"[{config}]" if mode == "index" else config)}
        parse(value)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{config!r} in {text!r} is neither a number nor a list of numbers") from None
    except (ValueError, TypeError, KeyError) as error:
        raise argparse.ArgumentTypeError(str(error.args[0])) from None
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ms_kungfu.fusion",
        description="Shows which gradients are reduced together, how large they are and in what order.",
        epilog=_TARGETS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--fusion",
        type=_fusion,
        metavar="MODE",
        help="none, auto, size:MB or index:I,J,...; replaces the mode that the program configures",
    )
    parser.add_argument("target", metavar="TARGET")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="for the program")
    return parser


class _StopError(BaseException):
    """Raised to end a program at its first step. A program's ``except Exception`` doesn't catch this class."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the command. Return 0. Exit with 2 if the command line is invalid or the target has no plan."""
    parser = _parser()
    options = parser.parse_args(words)
    try:
        plan = _plan(options.target, options.arguments, options.fusion)
    except LookupError as error:
        parser.error(str(error.args[0]))
    with printing(parser.prog):
        print(plan)
    return 0


def _plan(target: str, arguments: list[str], fusion: Any) -> Plan:
    if target in GRADIENTS:
        mode: Mode = AUTO if fusion is None else parse(fusion)
        return make_plan([Gradient(f"gradient {i}", 4 * n, "float32") for i, n in enumerate(GRADIENTS[target])], mode)
    where, colon, function = target.rpartition(":")
    if colon:
        return _plan_of_result(where, function, fusion)
    if not Path(target).is_file():
        raise LookupError(f"{target} is neither a file nor one of {', '.join(GRADIENTS)}; see -h")
    return _plan_of_program(target, arguments, fusion)


def _plan_of_result(where: str, function: str, fusion: Any) -> Plan:
    from mindspore import nn

    from ms_kungfu.fusion._mindspore import plan_of

    is_file = where.endswith(".py")
    sys.path.insert(0, os.path.dirname(os.path.abspath(where)) if is_file else "")
    module = import_module(Path(where).stem if is_file else where)
    if not hasattr(module, function):
        raise LookupError(f"{where} has no {function}")
    result = getattr(module, function)()
    if fusion is None and hasattr(result, "fusion_plan"):
        return result.fusion_plan()
    if isinstance(result, nn.Optimizer):
        return plan_of(result.parameters, fusion)
    return plan_of(result.trainable_params() if isinstance(result, nn.Cell) else result, fusion)


def _plan_of_program(program: str, arguments: list[str], fusion: Any) -> Plan:
    """Run the program and return the plan of its first step, because by then the program has set all fusion ids."""
    # MindSpore would log the stopped compilation as an error, and write a file about it to the current folder.
    quiet = {"GLOG_v": "4", **os.environ}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {**quiet, "MS_OM_PATH": folder}):
        return _plan_of_first_step(program, arguments, fusion)


def _plan_of_first_step(program: str, arguments: list[str], fusion: Any) -> Plan:
    from ms_kungfu.fusion._mindspore import plan_of
    from ms_kungfu.optimizers import KungFuGradReducer

    plans: list[Plan] = []

    def stop(reducer: KungFuGradReducer) -> Plan:
        plans.append(reducer.fusion_plan() if fusion is None else plan_of(reducer.planned_parameters, fusion))
        raise _StopError

    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    # The output is needed only if the program never reaches a step. Use a real file, because programs may use features
    # of standard output that a StringIO lacks.
    with tempfile.TemporaryFile("w+") as said:
        try:
            with mock.patch.object(KungFuGradReducer, "plan", property(stop)), contextlib.redirect_stdout(said):
                runpy.run_path(program, run_name="__main__")
        except BaseException:  # MindSpore may have converted ms_kungfu's exception to another one
            if not plans:
                raise
        finally:
            if not plans:
                said.seek(0)
                sys.stderr.write(said.read())
    if not plans:
        raise LookupError(f"{program} ended before an optimizer of ms_kungfu or a KungFuGradReducer ran a step")
    return plans[0]


if __name__ == "__main__":
    sys.exit(main())
