"""Rank 0 has its reductions overlap the backward pass, and the others don't. All groups are of the same tensors."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import ms_kungfu as kf

ms.set_context(mode=ms.GRAPH_MODE)
ms.set_seed(1)
net = nn.SequentialCell([nn.Dense(8, 8, has_bias=False) for _ in range(4)])
optimizer = kf.optimizers.KungFuMomentum(
    net.trainable_params(), 0.1, 0.9, fusion="none", overlap=kf.current_rank() == 0
)
step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer).set_train()
step(Tensor(np.ones((3, 8), np.float32)), Tensor(np.zeros((3, 8), np.float32))).asnumpy()
