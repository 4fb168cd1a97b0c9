"""MindSpore's tutorial on distributed training (ResNet-50 on CIFAR-10) with KungFu.

kungfu-run -np 2 python train.py                                  # each worker trains its shard of the data
kungfu-run -np 1 -w python train.py --elastic 20:2,60:4,100:1     # the cluster grows and shrinks during training
"""

import argparse
import os
from pathlib import Path

import data
import mindspore as ms
from loss import SoftmaxCrossEntropyExpand
from mindspore import nn
from mindspore.train import Accuracy, Callback, Model
from resnet import BLOCKS, ResNet

import ms_kungfu as kf
from ms_kungfu.callbacks import BroadcastCallback, KungFuElasticCallback, MonitorCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.monitoring import Monitor
from ms_kungfu.optimizers import KungFuMomentum

HERE = Path(__file__).parent
LOSSES = {"fused": nn.CrossEntropyLoss, "expanded": lambda: SoftmaxCrossEntropyExpand(sparse=True)}


class StopAfter(Callback):
    """End training after a number of steps, for a quick test."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num >= self.steps:
            run_context.request_stop()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elastic", nargs="?", const="", metavar="STEP:SIZE,...",
        help="let the cluster change: by this schedule, or by kungfu-run resize alone; needs kungfu-run -w",
    )  # fmt: skip
    parser.add_argument("--gradients", choices=["mean", "sum"], default="mean", help="over the workers")
    parser.add_argument(
        "--loss", choices=sorted(LOSSES), default="fused",
        help="the same cross entropy: MindSpore's, or expanded into its operators as in the tutorial (default fused)",
    )  # fmt: skip
    parser.add_argument("--fusion-mb", type=int, default=8, help="size of the groups in which gradients are reduced")
    parser.add_argument("--overlap", action="store_true", help="reduce gradients during the backward pass")
    parser.add_argument("--depth", type=int, choices=sorted(BLOCKS), default=50, help="layers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels at the start (default: %(default)s)")
    parser.add_argument(
        "--image-size", type=int, default=224, help="images are enlarged to this size (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker in a step")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="stop after this number of steps")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument(
        "--data-path", default=os.environ.get("DATA_PATH"),
        help="the folder cifar-10-batches-bin (default: DATA_PATH, else generated images)",
    )  # fmt: skip
    parser.add_argument("--test-samples", type=int, default=data.IMAGES, help="the most samples to test on")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for training.jsonl")
    return parser.parse_args()


def main():
    args = arguments()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    ms.set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": args.fusion_mb}})
    if args.overlap:
        ms.runtime.dispatch_threads_num(2)
    folder = data.find_or_make(args.data_path, HERE / "data")

    net = ResNet(args.depth, width=args.width)
    optimizer = KungFuMomentum(
        net.trainable_params(), args.learning_rate, 0.9, gradients_mean=args.gradients == "mean", overlap=args.overlap
    )
    model = Model(net, LOSSES[args.loss](), optimizer, metrics={"accuracy": Accuracy()})
    monitor = Monitor(args.out / "training.jsonl", log_interval=10)

    if args.elastic is None:
        # As in the tutorial: num_shards and shard_id stay the same for this worker during training.
        shard = {"num_shards": kf.current_cluster_size(), "shard_id": kf.current_rank()}
        train_data = data.samples(folder, "train", args.image_size, **shard).batch(args.batch_size, drop_remainder=True)
        callbacks = [BroadcastCallback(), MonitorCallback(monitor)]
    else:
        train_data = ElasticDataset(
            data.samples(folder, "train", args.image_size), args.batch_size, seed=1, drop_remainder=True
        )
        callbacks = [BroadcastCallback(), KungFuElasticCallback(args.elastic or None, monitor=monitor, wait=True)]
    if args.steps:
        callbacks.insert(0, StopAfter(args.steps))  # after the elastic callback, its request would act a step later
    if kf.current_rank() == 0:
        print(str(optimizer.fusion_plan()).splitlines()[0], flush=True)
    model.train(args.epochs, train_data, callbacks=callbacks, dataset_sink_mode=False)

    if kf.detached() or kf.current_rank() != 0:
        return
    test_data = data.samples(folder, "test", args.image_size).take(args.test_samples)
    accuracy = model.eval(test_data.batch(100), dataset_sink_mode=False)
    last = monitor.last
    print(
        f"{last.step} steps, {last.trained_samples} samples, {last.seconds:.2f} s a step of {last.batch_size}, "
        f"loss {last.loss:.3f}, test accuracy {accuracy['accuracy']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
