"""FOLDER KIND [thread] [handler] [exit]: trains with checkpoints in FOLDER/checkpoints, none of which is due.

In its third step a worker prints "holds" and waits until FOLDER/go exists. With checkpoints, it then waits until the
launcher has notified it that the job ends, so that the job ends after this step. KIND is "together" or "asynchronous",
or "none" without checkpoints. It trains in a thread, with a handler of its own for SIGTERM, or with OnRequestExit.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn
from mindspore.train import Callback, Model, OnRequestExit

import ms_kungfu as kf
from ms_kungfu.callbacks import KungFuElasticCallback

folder, kind, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
ms.set_context(mode=ms.PYNATIVE_MODE)
x = np.ones((800, 4), np.float32)
data = kf.dataset.ElasticDataset(ds.NumpySlicesDataset((x, x[:, :1]), ["x", "y"], shuffle=False), global_batch_size=8)
net = nn.Dense(4, 1)
optimizer = (kf.optimizers.PairAveragingOptimizer(nn.SGD(net.trainable_params(), 0.01)) if kind == "asynchronous"
             else kf.optimizers.KungFuSGD(net.trainable_params(), 0.01))  # fmt: skip
checkpoints = {} if kind == "none" else {"checkpoint_dir": folder / "checkpoints"}


class Holds(Callback):
    def on_train_step_end(self, run_context):
        if run_context.original_args().cur_step_num == 3:
            print("holds", kf.current_rank(), flush=True)
            while not (folder / "go").exists() or (checkpoints and not elastic.training.changes.job_end.signal):
                time.sleep(0.01)


elastic = KungFuElasticCallback(**checkpoints)


def train():
    callbacks = [Holds(), elastic]
    if "exit" in how:
        own = str(folder / os.environ["RANK_ID"])
        callbacks.append(OnRequestExit(save_mindir=False, file_name="asked", directory=own))
    Model(net, nn.MSELoss(), optimizer).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    print("trained", kf.detached(), int(optimizer.global_step.asnumpy()[0]), flush=True)


if "handler" in how:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("handled", flush=True)))
if "thread" in how:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
else:
    train()
