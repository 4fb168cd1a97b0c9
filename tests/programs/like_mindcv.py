"""OUT EPOCHS [options]: a program for MindSpore's msrun that knows nothing of ms_kungfu. It makes the calls that
mindcv's ``train.py --distribute`` makes (at 51b0636), in the same order, on digits and a small network.

Options: ``pynative``, ``sum`` (gradients_mean left at MindSpore's default, which sums), ``clip`` (a training cell of
its own, which reduces and clips), ``summed`` (behind each step all ranks add up something, and the last one names
itself), ``guarded`` (rank 0 alone has a ModelCheckpoint, too), ``paced`` (no step is begun behind the one that the file
``OUT/pace`` names, for the test that changes the cluster meanwhile).
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import Model, Tensor, nn, ops
from mindspore.communication import comm_func, get_group_size, get_rank, init
from mindspore.dataset import transforms
from mindspore.ops import ReduceOp
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint, save_checkpoint

OUT, EPOCHS, OPTIONS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
BATCH = 8


class AllReduceSum(nn.Cell):
    def __init__(self):
        super().__init__()
        self.all_reduce = ops.AllReduce(ReduceOp.SUM)

    def construct(self, x):
        return self.all_reduce(x)


class ClippedStep(nn.TrainOneStepWithLossScaleCell):
    """Reduces, then clips, then updates."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer, scale_sense=Tensor(1.0, ms.float32))

    def construct(self, *inputs):
        loss = self.network(*inputs)
        sens = ops.ones_like(loss)
        gradients = self.grad(self.network, self.weights)(*inputs, sens)
        gradients = ops.clip_by_global_norm(self.grad_reducer(gradients), 5.0)
        return ops.depend(loss, self.optimizer(gradients))


class StateMonitor(Callback):
    """Evaluates after each epoch, sums what all ranks have found, and lets rank 0 write."""

    def __init__(self, model, dataset_val, rank_id, device_num):
        super().__init__()
        self.model, self.dataset_val = model, dataset_val
        self.rank_id, self.device_num = rank_id, device_num
        self.all_reduce = AllReduceSum()

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        with open(OUT / f"steps.{os.getpid()}", "a") as file:
            print(params.cur_step_num, params.cur_epoch_num, params.batch_num, params.net_outputs, file=file)
        if "summed" in OPTIONS:
            result = self.all_reduce(Tensor([1.0], ms.float32))
            assert result.asnumpy().tolist() == [self.device_num]
            last = comm_func.broadcast(Tensor([self.rank_id, params.cur_step_num], ms.int32), self.device_num - 1)
            played, step = last.asnumpy().tolist()
            assert step == params.cur_step_num
            with open(OUT / f"played.{os.getpid()}", "a") as file:
                print(step, played, file=file)
        while "paced" in OPTIONS and params.cur_step_num >= int((OUT / "pace").read_text() or 0):
            time.sleep(0.02)

    def on_train_epoch_end(self, run_context):
        params = run_context.original_args()
        found = self.model.eval(self.dataset_val, dataset_sink_mode=False)
        result = self.all_reduce(Tensor(list(found.values()), ms.float32)) / self.device_num
        line = {"epoch": params.cur_epoch_num, "rank": self.rank_id, "accuracy": float(result.asnumpy()[0])}
        with open(OUT / f"epochs.{os.getpid()}", "a") as file:
            print(json.dumps(line), file=file)
        if self.rank_id == 0:
            save_checkpoint(params.train_network, str(OUT / f"epoch-{params.cur_epoch_num}.ckpt"))


def digits(split, rank_id, device_num, shuffle):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = slice(0, 1280) if split == "train" else slice(1280, 1797)
    columns = (x[chosen].astype(np.float32) / 16, y[chosen].astype(np.int64))
    return ds.NumpySlicesDataset(
        columns, ["image", "label"], shuffle=shuffle, num_shards=device_num, shard_id=rank_id
    )  # fmt: skip


def loader(dataset, drop_remainder):
    dataset = dataset.map(transforms.TypeCast(ms.int32), "label")
    return dataset.batch(BATCH, drop_remainder=drop_remainder)


def main():
    OUT.mkdir(exist_ok=True)
    ms.set_context(mode=ms.PYNATIVE_MODE if "pynative" in OPTIONS else ms.GRAPH_MODE)
    init()
    rank_id, device_num = get_rank(), get_group_size()
    mean = {} if "sum" in OPTIONS else {"gradients_mean": True}
    ms.set_auto_parallel_context(device_num=device_num, parallel_mode="data_parallel", **mean)
    assert ms.get_auto_parallel_context("parallel_mode") == "data_parallel"
    all_reduce = AllReduceSum()
    random.seed(42)
    np.random.seed(42)
    ms.set_seed(42)

    dataset_train = digits("train", rank_id, device_num, shuffle=True)
    train_count = all_reduce(Tensor(dataset_train.get_dataset_size(), ms.int32))
    assert 1280 <= int(train_count.asnumpy()) < 1280 + device_num, train_count
    loader_train = loader(dataset_train, drop_remainder=True)
    num_batches = loader_train.get_dataset_size()
    dataset_eval = digits("eval", rank_id, device_num, shuffle=False)
    loader_eval = loader(dataset_eval, drop_remainder=False)
    eval_count = all_reduce(Tensor(dataset_eval.get_dataset_size(), ms.int32))
    assert 517 <= int(eval_count.asnumpy()) < 517 + device_num, eval_count

    network = nn.SequentialCell(nn.Dense(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dense(32, 10))
    loss = nn.CrossEntropyLoss()
    rate = 0.1 / (device_num if "sum" in OPTIONS else 1)
    rates = nn.cosine_decay_lr(0.0, rate, num_batches * EPOCHS, num_batches, EPOCHS)
    optimizer = nn.Momentum(network.trainable_params(), rates, 0.9)
    metrics = {"accuracy": nn.Accuracy()}
    if "clip" in OPTIONS:
        step = ClippedStep(nn.WithLossCell(network, loss), optimizer).set_train()
        model = Model(step, eval_network=nn.WithEvalCell(network, loss), metrics=metrics, eval_indexes=[0, 1, 2])
    else:
        manager = ms.amp.FixedLossScaleManager(1.0, drop_overflow_update=False)
        model = Model(network, loss, optimizer, metrics=metrics, loss_scale_manager=manager)
    (OUT / f"started.{os.getpid()}").touch()
    monitor = StateMonitor(model, loader_eval, rank_id, device_num)
    callbacks = [monitor]
    if "guarded" in OPTIONS and rank_id == 0:
        config = CheckpointConfig(save_checkpoint_steps=num_batches, keep_checkpoint_max=10)
        callbacks.append(ModelCheckpoint(prefix="guarded", directory=str(OUT), config=config))
    model.train(EPOCHS, loader_train, callbacks=callbacks, dataset_sink_mode=True)


if __name__ == "__main__":
    main()
