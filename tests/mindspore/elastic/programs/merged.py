"""OUT: each worker trains a model of its own, with moving statistics; when training is over all make one of them."""

import mindspore as ms
from mindspore import nn
from reporting import digest, end, numbered, report, training_step

from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import SynchronousAveragingOptimizer

ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(1)
net = nn.SequentialCell(nn.BatchNorm1d(4), nn.Dense(4, 2))
optimizer = SynchronousAveragingOptimizer(nn.Momentum(net.trainable_params(), 0.1, 0.9))
train_step = training_step(net, optimizer)
data = ElasticDataset(numbered(24), global_batch_size=8)
elastic = ElasticTraining(net, optimizer, dataset=data)
for _ in elastic.epochs(1):
    net.set_train()
    for x, y in data:
        train_step(x, y)
        elastic.step_end()


def tell(kind):
    statistics = [p for p in net.get_parameters() if "moving" in p.name]
    report(kind, step=elastic.step, weights=digest(net.trainable_params()), statistics=digest(statistics))


tell("own")
optimizer.merge()
elastic.average_statistics()
tell("merged")
end()
