"""OUT: batch normalization through 1 -> 3 -> rank 0 killed -> 2 workers; the network as it began and ended is in
OUT/begin.ckpt and OUT/end.ckpt."""

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from mindspore.train import Callback, Model
from reporting import Loss, die, end, layers, numbered

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

out = Path(sys.argv[1])
ms.set_context(mode=ms.GRAPH_MODE)
net = layers(nn.BatchNorm1d(8), nn.Tanh())
if not (out / "begin.ckpt").exists():
    ms.save_checkpoint(net, str(out / "begin.ckpt"))


class Killed(Callback):
    def on_train_step_begin(self, run_context):
        if kf.current_rank() == 0 and run_context.original_args().cur_step_num == 7:
            die()


optimizer = KungFuMomentum(net.trainable_params(), nn.cosine_decay_lr(0.001, 0.05, 16, 8, 2), 0.9)
data = ElasticDataset(numbered(96), global_batch_size=12, seed=5)
callbacks = [Killed(), KungFuElasticCallback("3:3", wait=True)]
Model(net, Loss(), optimizer).train(2, data, callbacks=callbacks, dataset_sink_mode=False)
if kf.current_rank() == 0:
    ms.save_checkpoint(net, str(out / "end.ckpt"))
end()
