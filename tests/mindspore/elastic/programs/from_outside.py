"""OUT: no schedule; another process resizes the cluster while it trains. Ends when it has been there and back."""

import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from reporting import numbered, numbers, report, training_step

import ms_kungfu as kf
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import KungFuMomentum

ms.set_context(mode=ms.PYNATIVE_MODE)
net = nn.Dense(4, 2)
optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
train_step = training_step(net, optimizer)
data = ElasticDataset(numbered(60), global_batch_size=12)
elastic = ElasticTraining(net, optimizer, dataset=data)
wanted, first_epoch = [3, 1], 0
for epoch in elastic.epochs(10_000):
    for x, y in data:
        train_step(x, y)
        report("step", step=elastic.step + 1, epoch=epoch, samples=numbers(y))
        came_true = kf.current_cluster_size() == {2: 1, 1: 3, 0: 0}[len(wanted)]  # a newer wish would take its place
        if kf.current_rank() == 0 and came_true and elastic.step % 20 == 3:
            # stays until the config server has answered; the workers go over when the newcomers are ready
            size = wanted.pop(0)
            run = Path(sys.executable).parent / "kungfu-run"
            command = [str(run), "resize", str(size), "-config-server", os.environ["KUNGFU_CONFIG_SERVER"]]
            subprocess.run(command, check=True, env={k: v for k, v in os.environ.items() if k != "KUNGFU_BROKER"})
        change = elastic.step_end()
        if change.changed:
            report("change", step=elastic.step, old=change.old_size, new=change.new_size, epoch=epoch)
            first_epoch = epoch if change.new_size == 1 else first_epoch
    if first_epoch and epoch > first_epoch and not elastic.should_stop:
        break
