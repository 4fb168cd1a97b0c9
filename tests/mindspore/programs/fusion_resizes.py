"""SCHEDULE [overlap]: several fusion groups on a cluster that resizes; each step all ranks compare their weights."""

import sys

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from ending import end
from mindspore import nn
from mindspore.train import Callback, Model

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

ms.set_context(mode=ms.GRAPH_MODE)


def weights():
    return np.concatenate([p.asnumpy().ravel() for p in net.trainable_params()])


class Compare(Callback):
    def on_train_step_end(self, run_context):
        everyones = kf.comm.all_gather(weights(), name="compare").reshape(kf.current_cluster_size(), -1)
        assert (everyones == everyones[0]).all()


random = np.random.RandomState(0)
x = random.randn(240, 4).astype(np.float32)
rows = list(zip(x, np.tanh(x[:, :2])))
ms.set_seed(1)
net = nn.SequentialCell(nn.Dense(4, 6), nn.Tanh(), nn.Dense(6, 5), nn.Tanh(), nn.Dense(5, 2))
# A program that differs in what it made before must not differ in its groups.
for _ in range(kf.cluster_version()):
    kf.ops.KungFuAllReduce()
optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9, overlap="overlap" in sys.argv)
net[0].set_comm_fusion(2)
net[2].set_comm_fusion(0)
assert len(optimizer.fusion_plan().groups) == 4
model = Model(net, nn.MSELoss(), optimizer)
data = ElasticDataset(ds.GeneratorDataset(rows, ["x", "y"], shuffle=False), global_batch_size=24, seed=3)
schedule = None if sys.argv[1] == "none" else sys.argv[1]
model.train(2, data, callbacks=[Compare(), KungFuElasticCallback(schedule, wait=True)], dataset_sink_mode=False)
print("left" if kf.detached() else f"weights {len(weights())} {np.abs(weights()).sum():.6f}")
end()
