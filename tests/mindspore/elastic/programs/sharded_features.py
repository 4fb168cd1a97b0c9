"""OUT MODE KIND EPOCHS SCHEDULE [STEP:RANK:N ...] [checkpoints=FOLDER]: trainings on a dataset that deals shards, with
more in a step than gradients and an optimizer. The worker that has this rank in this step kills itself before it
computes its N-th shard of it, from 0, those counted that are computed for comparison.

KIND, under Model.train: plain; mixed: most of it in float16; fixed: a fixed loss scale; scaled: a dynamic one, which a
sample overflows; fit: with evaluation. In a loop of one's own: scaler: as scaled, by ms.amp; clip: clipping by the
global norm of the gradients' sum, groups of parameters and fusion groups, monitored, where one worker is alone beside
a plain program; gan: two networks and steps."""

import os
import signal
import sys

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.train import Callback, Model
from reporting import Loss, digest, end, layers, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.dataset.batches import ShardBatches
from ms_kungfu.elastic import ElasticTraining, ShardedStep, sharded_step, straggler_weights
from ms_kungfu.monitoring import Monitor
from ms_kungfu.monitoring.noise_scale import unbiased_estimates
from ms_kungfu.optimizers import KungFuAdam, KungFuMomentum, KungFuTrainOneStepWithLossScaleCell

mode, kind, epochs = sys.argv[2], sys.argv[3], int(sys.argv[4])
schedule = None if sys.argv[5] == "none" else sys.argv[5]
deaths = [each for each in sys.argv[6:] if "=" not in each]
checkpoints = {}
for each in sys.argv[6:]:
    if "=" in each:
        checkpoints = {"checkpoint_dir": each.partition("=")[2], "checkpoint_every": 2, "resume": True}
ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
ms.set_seed(1)
net = layers(nn.Tanh())
net.set_train()
loss_fn = Loss()
data = ElasticDataset(numbered(90), global_batch_size=32, shards=8, seed=5)


class Spiked(nn.Cell):
    """The gradient of sample 7 is finite, and infinite times the scale."""

    def construct(self, output, y):
        number = y[:, 2:]
        weight = ops.select(number == 7, ops.full_like(number, 1e30), ops.ones_like(number))
        return (weight * (output - y[:, :2]) ** 2).mean()


# -- deaths in the midst of a step ------------------------------------------------------------------------------------

straggler_weights._GAIN = float("inf")  # they are told by the shard: a loaded machine must not deal others
steps_done = lambda: 0  # noqa: E731
computed = (0, 0)  # the step, and what has been computed in it
compute = sharded_step.Shard.__call__


def dying(self, *columns):
    global computed
    step = steps_done() + 1
    computed = (step, computed[1] if computed[0] == step else 0)
    if f"{step}:{kf.current_rank()}:{computed[1]}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    computed = (step, computed[1] + 1)
    return compute(self, *columns)


sharded_step.Shard.__call__ = dying


# -- Model.train ------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Comes after the elastic callback: sees what the next step begins with."""

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        outputs, more = params.net_outputs, {}
        if isinstance(outputs, tuple):
            outputs, overflow, scale = outputs
            more = {"overflow": bool(overflow.asnumpy()), "scale": float(scale.asnumpy())}
        report("step", step=params.cur_step_num, loss=outputs.asnumpy().tobytes().hex(), **more)
        if not kf.detached():
            state, weights = digest(params.train_network.get_parameters()), digest(net.trainable_params())
            report("after", step=params.cur_step_num, parameters=state, weights=weights)

    def on_eval_end(self, run_context):
        report("evaluated", step=elastic.training.step, loss=run_context.original_args().metrics["loss"])


def with_model():
    global elastic, steps_done
    scale = 1024.0 if kind == "fixed" else 1.0
    optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9, loss_scale=scale)
    elastic = KungFuElasticCallback(schedule, wait=True, **checkpoints)
    steps_done = lambda: elastic.training.step  # noqa: E731
    if kind == "scaled":
        scaler = nn.DynamicLossScaleUpdateCell(2.0**40, 2, 2)
        own = KungFuTrainOneStepWithLossScaleCell if mode == "graph" else nn.TrainOneStepWithLossScaleCell
        model = Model(own(nn.WithLossCell(net, Spiked()), optimizer, scale_sense=scaler))
    else:
        manager = ms.FixedLossScaleManager(scale, drop_overflow_update=False) if kind == "fixed" else None
        mixed = {"amp_level": "O3"} if kind == "mixed" else {}
        model = Model(net, loss_fn, optimizer, {"loss": ms.train.Loss()}, loss_scale_manager=manager, **mixed)
    callbacks = [elastic, Watch()]
    if kind == "fit":
        model.fit(epochs, data, numbered(26).batch(4), callbacks=callbacks, dataset_sink_mode=False)
    else:
        model.train(epochs, data, callbacks=callbacks, dataset_sink_mode=False)


# -- loops of one's own -----------------------------------------------------------------------------------------------


def loss_of(network):
    def forward(x, y):  # a lambda within a call is what MindSpore can't read
        return loss_fn(network(x), y)

    return forward


def scaler():
    optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
    scaler, spiked = ms.amp.DynamicLossScaler(2**40, 2, 2), Spiked()

    def scaled(x, y):
        return scaler.scale(spiked(net(x), y))

    grad = ms.value_and_grad(scaled, None, net.trainable_params())

    def forward_backward(x, y):
        loss, gradients = grad(x, y)
        return scaler.unscale(loss), scaler.unscale(gradients)

    def update(gradients):
        finite = ms.amp.all_finite(gradients)
        if finite:
            optimizer(gradients)
        scaler.adjust(finite)
        return finite

    step = ShardedStep(forward_backward, update, trained=[net, optimizer])
    loop([net, optimizer, scaler], step, lambda: {"scale": float(scaler.scale_value.asnumpy())})


def clip():
    net[0].set_comm_fusion(2)
    optimizer = KungFuMomentum(groups(net), 0.05, 0.9)
    other = layers(nn.Tanh())
    for mine, its in zip(net.trainable_params(), other.trainable_params()):
        its.set_data(ms.Tensor(mine.asnumpy().copy()))
    plain = nn.Momentum(groups(other), 0.05, 0.9)

    def update(gradients):
        return optimizer(ops.clip_by_global_norm(gradients, 3.0))

    grad = ms.value_and_grad(loss_of(net), None, optimizer.parameters)
    others_grad = ms.value_and_grad(loss_of(other), None, plain.parameters)

    def beside():
        """The same step without ms_kungfu, where this worker has all of its shards."""
        if sys.argv[5] != "none" or deaths or kf.current_cluster_size() > 1:
            return {}
        batches = ShardBatches.current()
        losses, leaves = zip(*(others_grad(*batches.batch(i)) for i in range(batches.count)))
        expected.update(measured([float(loss) for loss in losses], leaves, batches.last_share))
        leaves = list(leaves)
        if batches.last_share != 1:
            leaves[-1] = [g * batches.last_share for g in leaves[-1]]
        while len(leaves) > 1:
            pairs = [[a + b for a, b in zip(*leaves[i : i + 2])] for i in range(0, len(leaves) - 1, 2)]
            leaves = pairs + leaves[2 * len(pairs) :]
        plain(ops.clip_by_global_norm(tuple(leaves[0]), 3.0))
        weights = [net.trainable_params(), other.trainable_params()]
        assert digest(weights[0]) == digest(weights[1])
        return {"plain": True}

    def check(record):
        if expected:
            found = {name: getattr(record, name) for name in expected}
            assert np.allclose(list(found.values()), list(expected.values()), rtol=1e-4), (found, expected)

    expected = {}
    step = ShardedStep(grad, update, trained=[net, optimizer], gradients_mean=False)
    loop([net, optimizer], step, beside, check, monitor=Monitor(half_life=1e-9, update_ratio_interval=0))


def measured(losses, leaves, last):
    """What a monitor should have to say of these shards of four samples, the last of which may have fewer."""
    flat = np.array([np.concatenate([g.asnumpy().ravel() for g in leaf]) for leaf in leaves], np.float64)
    shares = [1.0] * (len(leaves) - 1) + [last]
    local, reduced = (flat**2).sum(axis=1).mean(), (np.average(flat, axis=0, weights=shares) ** 2).sum()
    squared, covariance = unbiased_estimates(local, reduced, [4 * share for share in shares])
    return {
        "loss": np.average(losses, weights=shares),
        "gradient_norm": np.sqrt(reduced),
        "gradient_variance": local - reduced,
        "gradient_noise_scale": max(covariance, 0) / squared if squared > 0 else np.inf,
        "batch_size": 4 * sum(shares),
    }


def groups(of):
    weights = [p for p in of.trainable_params() if p.ndim > 1]
    biases = [p for p in of.trainable_params() if p.ndim == 1]
    return [{"params": weights, "lr": 0.02, "weight_decay": 0.01}, {"params": biases}]


def gan():
    other = layers(nn.Tanh())
    other.set_train().update_parameters_name("other.")
    first, second = KungFuMomentum(net.trainable_params(), 0.05, 0.9), KungFuAdam(other.trainable_params(), 0.05)
    second.update_parameters_name("second.")

    def between(x, y):
        return loss_fn(other(x) - net(x), y)

    gradient = ms.value_and_grad(loss_of(net), None, net.trainable_params())
    others = ms.value_and_grad(between, None, other.trainable_params())
    steps = ShardedStep(gradient, first, trained=net), ShardedStep(others, second, trained=[net, other])

    def step(x, y):
        steps[0](x, y)
        return steps[1](x, y)

    loop([net, other, first, second], step, dict)


def loop(trained, step, more, check=lambda record: None, monitor=None):
    global elastic, steps_done
    elastic = ElasticTraining(*trained, schedule=schedule, wait=True, dataset=data, monitor=monitor, **checkpoints)
    steps_done = lambda: elastic.step  # noqa: E731
    for _ in elastic.epochs(epochs):
        for x, y in data:
            loss = step(x, y)
            report("step", step=elastic.step + 1, loss=loss.asnumpy().tobytes().hex(), **more())
            elastic.step_end(loss)
            if monitor is not None:
                check(monitor.last)
            if not elastic.should_stop:
                weights = digest(net.trainable_params())
                report("after", step=elastic.step, parameters=digest(elastic.parameters), weights=weights)


{"scaler": scaler, "clip": clip, "gan": gan}.get(kind, with_model)()
end()
