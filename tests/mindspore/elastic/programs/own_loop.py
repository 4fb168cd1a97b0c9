"""OUT SCHEDULE EPOCHS BATCH MODE [checkpoint:STEP] [STEP:RANK:PLACE ...]: a loop of one's own. A worker kills itself
where it has that rank in that step: "taken" is when it has its batch and no rank has its gradients, "trained" when the
step is done and it has not been counted."""

import sys

import mindspore as ms
from mindspore import nn
from reporting import die, digest, end, layers, numbered, numbers, report, training_step

import ms_kungfu as kf
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.optimizers import KungFuAdam

schedule = None if sys.argv[2] == "none" else sys.argv[2]
epochs, batch = int(sys.argv[3]), int(sys.argv[4])
deaths = sys.argv[6:]
ms.set_context(mode=ms.GRAPH_MODE if sys.argv[5] == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)

net = layers(nn.Tanh())
optimizer = KungFuAdam(net.trainable_params(), 0.2, eps=1.0)  # no whole step of what is rounding only
train_step = training_step(net, optimizer, jit=True)


def die_at(place):
    if f"{elastic.step + 1}:{kf.current_rank()}:{place}" in deaths:
        die()


data = ElasticDataset(numbered(240), global_batch_size=batch, seed=5)
checkpoints = {}
for each in deaths:
    if each.startswith("checkpoint:"):
        checkpoints = {"checkpoint_dir": f"{sys.argv[1]}/checkpoints", "checkpoint_every": int(each.split(":")[1])}
elastic = ElasticTraining(net, optimizer, schedule=schedule, wait=True, dataset=data, **checkpoints)
for epoch in elastic.epochs(epochs):
    for x, y in data:
        die_at("taken")
        loss = train_step(x, y)
        samples = numbers(y)[: data.weight]  # none where they repeat another worker's
        assert len(samples) == data.weight
        mean = kf.elastic.mean(loss, data.weight)
        report("step", step=elastic.step + 1, epoch=epoch, loss=mean, samples=samples)
        die_at("trained")
        elastic.step_end()
        if not elastic.should_stop:
            report("after", step=elastic.step, parameters=digest(elastic.parameters))
if not kf.detached():
    report("end", step=elastic.step, epoch=elastic.epoch)
end()
