"""OUT OPTIONS: Model.fit of a network with moving statistics, beside MindSpore's own callbacks.

Each worker reports every step and epoch. OPTIONS is JSON: mode, schedule, epochs, total, batch, valid (same, shuffled,
sharded, elastic), train (elastic, per worker, sharded), callbacks (names), deaths ([step, "eval:EPOCH:BATCH" or
"save:STEP", rank, or "first": the rank that comes there first]).
"""

import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
from mindspore import nn
from mindspore.train import (
    MAE,
    Callback,
    CheckpointConfig,
    EarlyStopping,
    History,
    LossMonitor,
    Model,
    ModelCheckpoint,
    ReduceLROnPlateau,
    SummaryCollector,
    TimeMonitor,
)
from mindspore.train.callback import _checkpoint
from reporting import Loss, Numbered, die, digest, end, numbered, numbers, report

import ms_kungfu as kf
from ms_kungfu import membership
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.optimizers import KungFuMomentum

out, options = Path(sys.argv[1]), json.loads(sys.argv[2])
ms.set_context(mode=ms.GRAPH_MODE if options.get("mode") == "graph" else ms.PYNATIVE_MODE)
epochs, deaths = options.get("epochs", 3), options.get("deaths", [])


class Error(MAE):
    """Without the sample's number; tells which samples it has seen."""

    seen: list = []

    def clear(self):
        super().clear()
        Error.seen = []

    def update(self, *inputs):
        Error.seen += numbers(inputs[1])
        super().update(inputs[0], inputs[1][:, :2])


class Watch(Callback):
    def on_train_step_begin(self, run_context):
        if [run_context.original_args().cur_step_num, kf.current_rank()] in deaths:
            die()

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        report(
            "step",
            step=params.cur_step_num,
            epoch=params.cur_epoch_num,
            batch_num=params.batch_num,
            step_in_epoch=(params.cur_step_num - 1) % params.batch_num + 1,
            detached=kf.detached(),
            samples=numbers(params.train_dataset_element[1]),
            rate=float(params.optimizer.learning_rate.asnumpy()),
        )

    def on_eval_begin(self, run_context):
        self.batch = 0

    def on_eval_step_end(self, run_context):
        self.batch += 1
        if [f"eval:{run_context.original_args().cur_epoch_num}:{self.batch}", kf.current_rank()] in deaths:
            die()

    def on_train_epoch_end(self, run_context):
        params = run_context.original_args()
        if not kf.detached():
            keeping = {type(c).__name__: c for c in params.list_callback}
            state = {
                "EarlyStopping": ("wait", "best"),
                "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
                "History": ("history",),
                "Carried": ("count",),
            }
            found = {k: [str(getattr(keeping[k], a)) for a in names] for k, names in state.items() if k in keeping}
            report(
                "epoch",
                step=params.cur_step_num,
                epoch=params.cur_epoch_num,
                seen=Error.seen,
                results={k: float(v).hex() for k, v in params.get("eval_results", {}).items()},
                loss=float(params.net_outputs.asnumpy()).hex(),
                statistics=digest([p for p in params.train_network.get_parameters() if "moving" in p.name]),
                rate=float(params.optimizer.learning_rate.asnumpy()),
                state=found,
            )


def save_checkpoint(*arguments, **keywords):
    place, first = f"save:{elastic.training.step}", out / "first"
    if [place, kf.current_rank()] in deaths or ([place, "first"] in deaths and not first.exists()):
        first.touch()
        Path(arguments[1]).write_bytes(b"the beginning of a file")
        die()
    save(*arguments, **keywords)


save, _checkpoint.save_checkpoint = _checkpoint.save_checkpoint, save_checkpoint


class Alone(Callback):
    """Evaluates at rank 0 alone, slowly."""

    def on_train_epoch_end(self, run_context):
        if kf.current_rank() == 0:
            model.eval(valid_dataset("slow"))


class Counter(Callback):
    """Of the program's own, with state."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_train_step_end(self, run_context):
        self.count += 1


class Carried(Counter):
    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Slow(Numbered):
    def __getitem__(self, i):
        time.sleep(0.5)
        return super().__getitem__(i)


def valid_dataset(kind):
    total = options.get("valid_total", 26)
    if kind == "elastic":
        return ElasticDataset(numbered(total), global_batch_size=7, shuffle=False)
    rank, size = (kf.current_rank(), kf.current_cluster_size()) if kind == "sharded" else (None, None)
    if kind == "shuffled":
        ms.dataset.config.set_seed(kf.current_rank() + 1)
    samples = Slow(total) if kind == "slow" else Numbered(total)
    shuffle = kind == "shuffled"
    return ds.GeneratorDataset(samples, ["x", "y"], shuffle=shuffle, num_shards=size, shard_id=rank).batch(4)


def train_dataset(kind):
    total, batch = options.get("total", 40), options.get("batch", 8)
    if kind == "elastic":
        return ElasticDataset(numbered(total), global_batch_size=batch, seed=3)
    if kind == "per worker":
        return ElasticDataset(numbered(total), batch, seed=3)
    rank, size = kf.current_rank(), kf.current_cluster_size()
    return ds.GeneratorDataset(Numbered(total), ["x", "y"], shuffle=False, num_shards=size, shard_id=rank).batch(batch)


make = {
    "ModelCheckpoint": lambda: ModelCheckpoint(
        "net", str(out / "saved"), CheckpointConfig(options.get("save", 2), keep_checkpoint_max=options.get("keep", 2))
    ),
    "SummaryCollector": lambda: SummaryCollector(str(out / "summary"), collect_freq=1),
    "EarlyStopping": lambda: EarlyStopping(patience=4, min_delta=options.get("min_delta", 0.0)),
    "EarlyStopping on loss": lambda: EarlyStopping("loss", patience=2),
    "ReduceLROnPlateau": lambda: ReduceLROnPlateau(factor=0.5, patience=2, min_delta=options.get("min_delta", 0.0)),
    "LossMonitor": LossMonitor,
    "TimeMonitor": TimeMonitor,
    "History": History,
    "Alone": Alone,
    "Counter": Counter,
    "Carried": Carried,
}
ms.set_seed(options.get("seed", 5))
net = nn.SequentialCell(nn.BatchNorm1d(4), nn.Dense(4, 2))
optimizer = KungFuMomentum(net.trainable_params(), options.get("rate", 0.05), 0.9)
model = Model(net, Loss(), optimizer, metrics={"error": Error(), "mean": nn.Loss()})
elastic = KungFuElasticCallback(options.get("schedule"), wait=True)
others = [make[name]() for name in options.get("callbacks", [])]
# A callback that counts steps stands before the elastic callback, in whose place the state is transferred.
before = [c for c in others if options.get("last") or isinstance(c, Carried)]
callbacks = [*before, elastic, *(c for c in others if c not in before)]
report("start", joins=membership.is_joining())
model.fit(
    epochs,
    train_dataset(options.get("train", "elastic")),
    valid_dataset(options.get("valid", "same")),
    callbacks=[*callbacks, Watch()],
    dataset_sink_mode=False,
    valid_dataset_sink_mode=False,
)
if not kf.detached():
    report("end", parameters=digest(net.get_parameters()), step=elastic.training.step)
    if "ModelCheckpoint" in options.get("callbacks", []) and not options.get("schedule"):
        newest = max((out / "saved").glob("*.ckpt"), key=os.path.getmtime)
        kept = ms.load_checkpoint(str(newest))
        report("kept", file=newest.name, parameters=digest([kept[p.name] for p in net.trainable_params()]))
        report("trained", parameters=digest(net.trainable_params()))
    report("again", results={k: float(v).hex() for k, v in model.eval(valid_dataset("same")).items()})
    if options.get("valid") == "elastic":
        whole = model.eval(ds.GeneratorDataset(Numbered(21), ["x", "y"], shuffle=False).batch(7))
        samples = ElasticDataset(numbered(21), global_batch_size=7, shuffle=False)
        dealt = model.eval(samples, callbacks=[elastic])
        report("dealt", dealt=dealt["mean"], whole=whole["mean"])
end()
