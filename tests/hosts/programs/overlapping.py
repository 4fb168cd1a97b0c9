"""SCHEDULE STEPS: trains 8 MB of weights in GRAPH mode. Each worker says at the end whether its reductions overlapped,
and what its weights are."""

import sys
import zlib

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Model

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
steps = int(sys.argv[2])
x = np.random.default_rng(1).standard_normal((12 * steps, 64), np.float32)
net = nn.SequentialCell(nn.Dense(64, 1024), nn.ReLU(), nn.Dense(1024, 1024), nn.ReLU(), nn.Dense(1024, 1024))
optimizer = kf.optimizers.KungFuMomentum(net.trainable_params(), 0.001, 0.9)
samples = ds.NumpySlicesDataset({"x": x, "y": np.tile(x, 16)}, shuffle=False)
data = ElasticDataset(samples, global_batch_size=12)
elastic = KungFuElasticCallback(schedule=sys.argv[1], wait=True)
Model(net, nn.MSELoss(), optimizer).train(1, data, callbacks=[elastic], dataset_sink_mode=False)
weights = zlib.crc32(b"".join(p.asnumpy().tobytes() for p in net.trainable_params()))
print(f"overlapped {optimizer.grad_reducer.overlapped} in version {kf.cluster_version()} weights {weights}", flush=True)
