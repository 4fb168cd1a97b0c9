"""LeNet on handwritten digits, on a cluster that grows and shrinks while it trains. Start it with run-elastic.sh."""

import hashlib
from pathlib import Path

import data
import mindspore as ms
from arguments import parse_arguments
from log import EndAt, TrainingLog
from mindspore import nn
from mindspore.train import Accuracy, Model
from model import LeNet5

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

HERE = Path(__file__).parent


def draw(out, accuracy):
    try:
        import plot
    except ModuleNotFoundError as error:
        print(f"no picture is drawn: there is no {error.name}; ./install-kungfu.sh --extras examples brings it")
    else:
        plot.draw(out / "training.jsonl", out / "training.png", accuracy)


def main():
    args = parse_arguments()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(args.seed)

    folder = data.find_or_make(args.data_path, HERE / "data")
    try:
        elastic = KungFuElasticCallback(
            None if args.schedule == "none" else args.schedule,
            wait=True,  # changes happen at the schedule's exact steps, for the picture
            checkpoint_dir=args.checkpoint,
            checkpoint_every=None if args.checkpoint is None else 20,
            resume=args.resume,
        )
        train_data = ElasticDataset(
            data.samples(folder, "train"),
            global_batch_size=args.global_batch_size,
            shards=args.shards or None,
            seed=args.seed,
            ledger=args.ledger,
        )
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: {error}") from None

    net = LeNet5()
    steps = train_data.get_dataset_size()
    learning_rate = nn.cosine_decay_lr(0.0, args.learning_rate, args.epochs * steps, steps, args.epochs)
    optimizer = KungFuMomentum(net.trainable_params(), learning_rate, 0.9)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"accuracy": Accuracy()})

    log = TrainingLog(args.out / "training.jsonl", learning_rate, args.epochs * steps)
    ending = [] if args.until is None else [EndAt(args.until)]
    model.train(args.epochs, train_data, callbacks=[log, elastic, *ending], dataset_sink_mode=False)

    if kf.detached():
        return
    weights = b"".join(parameter.asnumpy().tobytes() for parameter in net.trainable_params())
    print(f"parameters {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)  # the same on all workers
    if kf.current_rank() != 0:
        return
    accuracy = model.eval(data.samples(folder, "test").batch(100), dataset_sink_mode=False)["accuracy"]
    draw(args.out, accuracy)
    print(f"test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
