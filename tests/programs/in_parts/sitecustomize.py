"""For stock programs that tests.programs runs with --in-parts, before them: each step of Model.train is computed in
``$PROGRAMS_PARTS`` parts of its batch, by the same weights and moving statistics, and their gradients and statistics
are averaged. So are shards (docs/shards.md), and this is MindSpore alone: the program's order, its optimizer, one
process, nothing of ms_kungfu."""

import os
import sys
from importlib.machinery import PathFinder

PARTS = int(os.environ.get("PROGRAMS_PARTS", "1"))
_BUILDER = "mindspore.train.amp"  # which makes the training cell of a Model


def divide(builder):
    import mindspore as ms
    import numpy as np

    class TrainOneStepInParts(builder.nn.TrainOneStepCell):
        def __init__(self, network, optimizer, sens=1.0):
            super().__init__(network, optimizer, sens)
            assert sens in (None, 1), f"a loss scale of {sens} would be left out"
            self.moving = [each for each in network.get_parameters() if not each.requires_grad]
            gradients = ms.value_and_grad(network, None, self.weights)
            self.gradients = ms.jit(gradients) if ms.get_context("mode") == ms.GRAPH_MODE else gradients

        def __call__(self, *columns):
            begun = [each.asnumpy().copy() for each in self.moving]
            rows = np.array_split(np.arange(len(columns[0])), PARTS)
            means = None
            for part in rows:
                for each, value in zip(self.moving, begun):
                    ms.ops.assign(each, ms.Tensor(value))  # set_data would take it from the graph
                loss, gradients = self.gradients(*(each[int(part[0]) : int(part[-1]) + 1] for each in columns))
                found = [
                    each.asnumpy() * np.float32(len(part) / len(columns[0]))
                    for each in (loss, *gradients, *self.moving)
                ]
                means = found if means is None else [one + other for one, other in zip(means, found)]
            gradients, moving = means[1 : -len(begun) or None], means[len(means) - len(begun) :]
            for each, value in zip(self.moving, moving):
                ms.ops.assign(each, ms.Tensor(value))
            self.optimizer(tuple(ms.Tensor(each) for each in gradients))
            return ms.Tensor(means[0])

    builder.nn.TrainOneStepCell = TrainOneStepInParts


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        found = PathFinder.find_spec(name, path, target) if name == _BUILDER else None
        if found is not None:
            execute = found.loader.exec_module
            found.loader.exec_module = lambda module: (execute(module), divide(module))
        return found


if PARTS > 1:
    sys.meta_path.insert(0, Finder)
