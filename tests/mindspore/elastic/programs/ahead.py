"""OUT LAUNCHER_LOG SHARDS ENTRIES: Model.train by a schedule of STEP:SIZE,... with wait=True, on a dataset that deals
SHARDS shards (0: parts). At the step of an entry the training waits until as many standbys are ready as it takes."""

import re
import sys
import time
from pathlib import Path

import mindspore as ms
from mindspore.train import Callback, Model
from reporting import Loss, digest, layers, numbered, report

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic.schedule import entries
from ms_kungfu.optimizers import KungFuMomentum

launcher_log, shards, schedule = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
sizes = [(0, 1), *entries(schedule)]
needed = {step: sum(max(0, size - before) for (_, before), (at, size) in zip(sizes, sizes[1:]) if at <= step)
          for step, _ in sizes[1:]}  # fmt: skip


class Wait(Callback):
    """Comes before the elastic callback."""

    def on_train_step_end(self, run_context):
        wanted = needed.get(run_context.original_args().cur_step_num, 0)
        while kf.current_rank() == 0 and len(re.findall(r"standby \d+ .* is ready", launcher_log.read_text())) < wanted:
            time.sleep(0.05)


class Watch(Callback):
    """Comes after it."""

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        cell = params.train_network if elastic._sharded is None else elastic._sharded.step.cell
        report("step", step=params.cur_step_num, graphs=len(cell.compile_cache))
        if not kf.detached():
            report("after", step=params.cur_step_num, parameters=digest(params.train_network.get_parameters()))


net = layers()
optimizer = KungFuMomentum(net.trainable_params(), 0.05, 0.9)
data = ElasticDataset(numbered(96), global_batch_size=12, shards=shards or None, seed=3)
elastic = KungFuElasticCallback(schedule, wait=True)
Model(net, Loss(), optimizer).train(2, data, callbacks=[Wait(), elastic, Watch()], dataset_sink_mode=False)
