"""The blocks of code in the pages, and what those of Python find ready: `python documented.py PAGE` runs a page's.

A line of HTML's comments above a block says how it is meant:

- ``<!-- not run: REASON -->``: it is only parsed, its flags and files are looked up.
- ``<!-- file: NAME -->``: it is kept as a file for the commands that follow, and not run by itself.
- ``<!-- after: NAME, NAME -->``: what these functions below prepare is there when it runs.
"""

from __future__ import annotations

import os
import re
import struct
import sys
import types
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w{}-]*)(?P<rest>.*)$")
MARKER = re.compile(r"^<!-- (?P<kind>not run|file|after): (?P<value>.+) -->$")
CODE = ("python", "bash", "diff")
OTHER = ("text", "{toctree}", "{public-surface}")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of its first line of code, from 1
    language: str
    code: str
    marker: str = ""
    value: str = ""

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def needs_mindspore(self):
        return self.marker == "after" or "mindspore" in self.code


def pages():
    found = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*/README.md")]
    found += (ROOT / "docs").rglob("*.md")
    return sorted(page for page in found if "_build" not in page.parts)


def blocks(page):
    found, lines, number = [], page.read_text(encoding="utf-8").splitlines(), 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != "```":
            end += 1
        indent = len(fence["indent"])
        marker = MARKER.match(lines[number - 1].strip()) if number else None
        code = "\n".join(line[indent:] for line in lines[number + 1 : end]) + "\n"
        how = (marker["kind"], marker["value"]) if marker else ()
        found.append(Block(page, number + 2, fence["language"], code, *how))
        number = end + 1
    return found


# ---- what is there before a block runs ------------------------------------------------------------------------------


def training(names):
    """A model, its data and its optimizer, as the pages call them."""
    import mindspore as ms
    import mindspore.dataset as ds
    import numpy as np
    from mindspore import nn, ops
    from mindspore.train import Callback, LossMonitor, Model

    import ms_kungfu as kf

    random = np.random.default_rng(0)
    x = random.normal(size=(96, 8)).astype(np.float32)
    y = (x @ random.normal(size=(8, 1))).astype(np.float32)
    samples = ds.NumpySlicesDataset((x, y), ["x", "y"], shuffle=False)
    net, loss_fn = nn.Dense(8, 1), nn.MSELoss()
    optimizer = kf.optimizers.KungFuMomentum(net.trainable_params(), 0.05, 0.9)
    names.update(ms=ms, ds=ds, np=np, nn=nn, ops=ops, kf=kf, Callback=Callback, LossMonitor=LossMonitor, Model=Model)
    names.update(samples=samples, net=net, loss_fn=loss_fn, optimizer=optimizer, params=net.trainable_params())
    names.update(data=kf.dataset.ElasticDataset(samples, global_batch_size=32), model=Model(net, loss_fn, optimizer))
    names.update(epochs=1, rank=0, loss=0.5)
    for module in (kf.callbacks, kf.dataset, kf.elastic, kf.optimizers):
        names.update({name: getattr(module, name) for name in module.__all__})


def own_loop(names):
    """A loop of one's own: its functions, and gradients."""
    ms, net, loss_fn, data = names["ms"], names["net"], names["loss_fn"], names["data"]

    def forward(x, y):
        return loss_fn(net(x), y)

    names.update(forward=forward, grad_fn=ms.value_and_grad(forward, None, net.trainable_params()))
    names.update(elastic=names["kf"].elastic.ElasticTraining(net, names["optimizer"], dataset=data))
    x, y = (ms.Tensor(names["np"].ones(shape, "float32")) for shape in ((4, 8), (4, 1)))
    names.update(grads=names["grad_fn"](x, y)[1], overflow=ms.Tensor(False))


def plain(names):
    """An optimizer of MindSpore's, for a program that reduces by itself."""
    names["optimizer"] = names["nn"].Momentum(names["net"].trainable_params(), 0.05, 0.9)


def adaptive(names):
    inner = names["nn"].Momentum(names["net"].trainable_params(), 0.05, 0.9)
    names["optimizer"] = names["kf"].optimizers.AdaptiveSGDOptimizer(inner, change_step=5)


def shards(names):
    names["data"] = names["kf"].dataset.ElasticDataset(names["samples"], global_batch_size=32, shards=4)


def cifar10(names):
    """A folder with CIFAR-10's files, of few images."""
    random = names["np"].random.default_rng(0)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        Path(f"{name}.bin").write_bytes(random.integers(0, 10, (40, 3073), "uint8").tobytes())
    names["path"] = os.getcwd()


def mnist(names):
    """A folder with MNIST's files, of few images."""
    from mindspore.dataset import vision

    random = names["np"].random.default_rng(0)
    for name in ("train", "t10k"):
        images, labels = random.integers(0, 256, (64, 28, 28), "uint8"), random.integers(0, 10, 64, "uint8")
        Path(f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 64, 28, 28) + images.tobytes())
        Path(f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, 64) + labels.tobytes())
    names.update(folder=os.getcwd(), transforms=[vision.Rescale(1 / 255, 0.0), vision.HWC2CHW()])


SETUPS = {f.__name__: f for f in (training, own_loop, plain, adaptive, shards, cifar10, mnist)}


def run_python(page):
    """Each block by itself, in a folder of its own; the first that fails ends it, with its place."""
    folder = Path.cwd()
    for block in blocks(page):
        if block.language != "python" or block.marker in ("not run", "file"):
            continue
        print(f"--- {block}", flush=True)
        (folder / f"block{block.line}").mkdir()
        os.chdir(folder / f"block{block.line}")
        # A file, as MindSpore's compiler reads the source of functions; lines are numbered as on the page.
        file = Path("block.py").resolve()
        file.write_text("\n" * (block.line - 1) + block.code, encoding="utf-8")
        # A module, where the compiler looks for what functions name.
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        names = vars(module)
        for setup in block.value.split(", ") if block.marker == "after" else ():
            SETUPS[setup](names)
        exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)


if __name__ == "__main__":
    run_python(Path(sys.argv[1]))
