"""OUT HOW:MODE[:samples|:seed|:contents] ...: trainings one after the other without a seed, so that each worker makes
other weights. HOW says what makes them the same: "callback", "loop" (ElasticTraining), "sync" (sync_net_parameters), or
"nothing". Rank 1 may have other data. The last one's error ends the program; an earlier one's is reported."""

import sys

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Model
from reporting import Loss, digest, end, layers, numbered, report, training_step

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback, sync_net_parameters
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import KungFuMomentum


def train(case):
    how, mode, *other = case.split(":")
    if kf.current_rank() != 1:
        other = []
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    net = layers(nn.BatchNorm1d(8))
    optimizer = KungFuMomentum(net.trainable_params(), 0.02, 0.9)
    moments = list(optimizer.moments)
    moments[0].set_data(ms.Tensor(np.full(moments[0].shape, kf.current_rank()), ms.float32))
    source = numbered(48 if "samples" in other else 60)
    if "contents" in other:
        source = ms.dataset.NumpySlicesDataset(np.zeros((60, 4), np.float32), ["x"], shuffle=False)
    data = ElasticDataset(source, global_batch_size=12, seed=int("seed" in other))
    weights = [p for p in optimizer.get_parameters() if ".moving_" not in p.name]
    report("before", case=case, step=0, weights=digest(weights))

    if how == "callback":
        Model(net, Loss(), optimizer).train(2, data, callbacks=[KungFuElasticCallback()], dataset_sink_mode=False)
    elif how == "loop":
        train_step = training_step(net, optimizer)
        elastic = ElasticTraining(net, optimizer, dataset=data)
        for _ in elastic.epochs(2):
            report("begin", case=case, step=elastic.step, all=digest(elastic.parameters))
            for x, y in data:
                train_step(x, y)
                elastic.step_end()
    else:
        if how == "sync":
            sync_net_parameters(net)
            sync_net_parameters(optimizer)
        Model(net, Loss(), optimizer).train(2, data, dataset_sink_mode=False)
    report("end", case=case, step=0, weights=digest(weights), random=np.random.rand())


*others, last = sys.argv[2:]
for each in others:
    try:
        train(each)
    except Exception as error:
        report("error", case=each, said=f"{type(error).__name__}: {error}")
train(last)
end()
