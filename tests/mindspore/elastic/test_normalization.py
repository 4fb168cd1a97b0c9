"""Batch normalization, which sees a worker's part of a batch, against one process of stock MindSpore that is given the
same parts."""

from __future__ import annotations

import json

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_kungfu.dataset import sharding


def steps_of(ledger):
    """What any worker knew of each step, in their order."""
    lines = [json.loads(line) for path in ledger.glob("*.jsonl") for line in path.read_text().splitlines()[1:]]
    found = {(line["epoch"], line["step"]): line for line in lines if "batch" in line}
    return [found[place] for place in sorted(found)]


def parts(step):
    """The samples of each rank that took part in it."""
    samples = sharding.permutation(step["total"], step["seed"], step["epoch"])
    batch = sharding.positions([tuple(each) for each in step["batch"]])
    blocks = {rank: sharding.block(len(batch), at, len(step["members"])) for at, rank in enumerate(step["members"])}
    return {rank: samples[batch[slice(*blocks[rank])]] for rank in step["participants"]}


def test_weights_and_moving_statistics_equal_those_of_one_process(run_elastic):
    """Each worker's statistics are its own, and at a change and at the end the mean of those that have trained."""
    reports = run_elastic("normalized.py")
    steps = steps_of(reports.ledger)
    sizes = [step["size"] for step in steps]
    assert sizes[2:7] == [1, 3, 3, 3, 3]
    # The cluster follows a death once its launcher has seen it, which may take some steps.
    assert sizes[-1] == 2
    assert sizes[7:] == sorted(sizes[7:], reverse=True)
    assert steps[6]["participants"] == [1, 2]

    random = np.random.RandomState(0)  # as reporting.Numbered has them
    x = random.randn(96, 4).astype(np.float32)
    net = nn.SequentialCell(nn.Dense(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dense(8, 2)).set_train()
    ms.load_param_into_net(net, ms.load_checkpoint(str(reports.folder / "begin.ckpt")))
    rates = nn.cosine_decay_lr(0.001, 0.05, 16, 8, 2)
    optimizer = nn.Momentum(net.trainable_params(), rates + rates[-1:], 0.9)  # a death may take a step more

    def loss(samples, targets):
        return ((net(samples) - targets) ** 2).mean()

    gradients_of = ms.grad(loss, None, net.trainable_params())
    statistics = [parameter for parameter in net.get_parameters() if ".moving_" in parameter.name]

    def mean(of):
        return [np.mean(values, axis=0) for values in zip(*of)]

    own = {0: [each.asnumpy().copy() for each in statistics]}
    for before, step in zip([steps[0], *steps], steps):
        if step["version"] != before["version"]:
            own = dict.fromkeys(range(step["size"]), mean(own[rank] for rank in before["participants"]))
        total, count = [0.0] * len(net.trainable_params()), 0
        for rank, samples in parts(step).items():
            for parameter, values in zip(statistics, own[rank]):
                parameter.copy_(Tensor(values))
            gradients = gradients_of(Tensor(x[samples]), Tensor(x[samples, :2] * 2 + 1))
            own[rank] = [each.asnumpy().copy() for each in statistics]
            total = [each + one.asnumpy() * len(samples) for each, one in zip(total, gradients)]
            count += len(samples)
        optimizer(tuple(Tensor((each / count).astype(np.float32)) for each in total))
    for parameter, values in zip(statistics, mean(own.values())):
        parameter.copy_(Tensor(values))

    end = ms.load_checkpoint(str(reports.folder / "end.ckpt"))
    for parameter in net.get_parameters():
        np.testing.assert_allclose(
            end[parameter.name].asnumpy(), parameter.asnumpy(), atol=1e-5, err_msg=parameter.name
        )
