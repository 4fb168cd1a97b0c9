"""OUT SCHEDULE WAIT STEPS CHECKPOINTS [STEP:RANK ...]: a short training whose log is looked at. A worker kills itself
where it has that rank in that step."""

import sys
from pathlib import Path

import mindspore as ms
from mindspore import nn
from reporting import die, end, numbered, training_step

import ms_kungfu as kf
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import KungFuMomentum

schedule, wait, steps, deaths = sys.argv[2], sys.argv[3] == "wait", int(sys.argv[4]), sys.argv[5:]
ms.set_context(mode=ms.PYNATIVE_MODE)
ms.set_seed(1)
net = nn.Dense(4, 2)
optimizer = KungFuMomentum(net.trainable_params(), 0.02, 0.9)
train_step = training_step(net, optimizer)
data = ElasticDataset(numbered(12 * steps), global_batch_size=12, seed=5)
elastic = ElasticTraining(
    net, optimizer, schedule=schedule, wait=wait, dataset=data,
    checkpoint_dir=Path(sys.argv[1]) / "checkpoints", checkpoint_every=steps,
)  # fmt: skip
for _ in elastic.epochs(1):
    for x, y in data:
        if f"{elastic.step + 1}:{kf.current_rank()}" in deaths:
            die()
        train_step(x, y)
        elastic.step_end()
end()
