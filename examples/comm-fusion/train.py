"""MindSpore's tutorial on communication fusion with KungFu: show which gradients are reduced together, and train.

Start it with kungfu-run -np 2 python train.py
"""

import argparse
import os

import mindspore as ms
from data import batches
from mindspore import nn
from network import Network

import ms_kungfu as kf

MODES = {
    "auto": {"mode": "auto", "config": None},
    "size": {"mode": "size", "config": 1},
    "index": {"mode": "index", "config": [1, 5]},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--mode",
        choices=["auto", "size", "index", "off"],
        default="auto",
        help="fusion mode of gradients with id 1, the default",
    )
    parser.add_argument("--no-ids", action="store_true", help="leave every parameter's id at 1")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker in a step")
    parser.add_argument(
        "--data-path", default=os.environ.get("DATA_PATH"),
        help="a folder with MNIST's IDX files (default: DATA_PATH, else generated images)",
    )  # fmt: skip
    args = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    on = args.mode != "off"
    ms.set_auto_parallel_context(comm_fusion={"allreduce": MODES[args.mode]} if on else {"openstate": False})
    kf.init()

    net = Network()
    optimizer = kf.optimizers.KungFuSGD(net.trainable_params(), learning_rate=1e-2)
    if not args.no_ids:
        net.head.set_comm_fusion(0)
        net.layer1.set_comm_fusion(1)
        net.layer2.set_comm_fusion(2)
        net.layer3.set_comm_fusion(3)
    loss_fn = nn.CrossEntropyLoss()

    def forward(image, label):
        return loss_fn(net(image), label)

    grad_fn = ms.value_and_grad(forward, None, net.trainable_params())

    @ms.jit
    def train_step(image, label):
        loss, grads = grad_fn(image, label)
        optimizer(grads)
        return loss

    talk = kf.current_rank() == 0
    if talk:
        for param in net.trainable_params():
            print(f"The parameter {param.name}'s fusion id is {param.comm_fusion}")
        print(optimizer.fusion_plan(), flush=True)

    data = batches(args.batch_size, kf.current_rank(), kf.current_cluster_size(), args.data_path)
    for epoch in range(args.epochs):
        losses = []
        for step, (image, label) in enumerate(data):
            losses.append(float(train_step(image, label)))
            if talk and step % 10 == 0:
                print(f"epoch: {epoch}, step: {step}, loss is {losses[-1]}", flush=True)
        if talk:
            print(f"epoch {epoch + 1} of {args.epochs}  loss {sum(losses) / len(losses):.4f}", flush=True)


if __name__ == "__main__":
    main()
