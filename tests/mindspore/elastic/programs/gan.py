"""OUT: Model.train of two networks with an optimizer each; the last rank dies between the updates of step 2 and of the
last step. A ModelCheckpoint stands before the elastic callback, and so sees the steps before they are undone."""

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint
from reporting import Loss, die, digest, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuAdam, KungFuMomentum

ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(1)
saved = Path(sys.argv[1]) / "saved"


class Step(nn.Cell):
    def __init__(self):
        super().__init__(auto_prefix=False)
        self.one, self.two = nn.Dense(4, 2), nn.Dense(4, 2)
        self.one.update_parameters_name("one.")
        self.two.update_parameters_name("two.")
        self.first = KungFuMomentum(self.one.trainable_params(), 0.1, 0.9)
        self.second = KungFuAdam(self.two.trainable_params(), 0.1)
        self.second.update_parameters_name("second.")
        self.loss_fn = Loss()
        self.steps = 0

    def gradient(self, net, x, y):
        return ms.value_and_grad(lambda x, y: self.loss_fn(net(x), y), None, net.trainable_params())(x, y)

    def construct(self, x, y):
        loss, grads = self.gradient(self.one, x, y)
        self.first(grads)
        step = elastic.training.step + 1
        if (step, kf.current_rank(), kf.current_cluster_size()) in ((2, 2, 3), (10, 1, 2)):
            die()
        self.second(self.gradient(self.two, x, y)[1])
        return loss


elastic = KungFuElasticCallback()
network = Step()
data = ElasticDataset(numbered(60), global_batch_size=6)
files = ModelCheckpoint("net", str(saved), CheckpointConfig(1, keep_checkpoint_max=99))
Model(network).train(1, data, callbacks=[files, elastic], dataset_sink_mode=False)
kept = ms.load_checkpoint(str(saved / "net-1_10.ckpt"))
mine = {p.name: p for p in network.get_parameters()}
assert set(kept) == set(mine), set(kept) ^ set(mine)
report(
    "end",
    step=elastic.training.step,
    parameters=digest([mine[name] for name in sorted(mine)]),
    kept=digest([kept[name] for name in sorted(mine)]),
)
