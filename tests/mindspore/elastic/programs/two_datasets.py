"""OUT SHARDS: trains two datasets by turns. A third worker joins while the second one is trained."""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model
from reporting import end, report

from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

ms.set_context(mode=ms.GRAPH_MODE)
shards = "auto" if sys.argv[2] == "auto" else None
x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
datasets = [
    ElasticDataset(NumpySlicesDataset((x, x[:, :1]), ["x", "y"], shuffle=False), global_batch_size=16, shards=shards)
    for _ in "ab"
]
net = nn.Dense(4, 1)
model = Model(net, nn.MSELoss(), KungFuMomentum(net.trainable_params(), 0.05, 0.9))
elastic = KungFuElasticCallback("6:3", wait=True)
for number, epochs in ((0, 1), (1, 2), (0, 2)):
    model.train(epochs, datasets[number], callbacks=[elastic], dataset_sink_mode=False)
    report("call", number=number, epochs=[data.epoch for data in datasets])
end()
