"""The callbacks on a cluster of one: what they refuse, and that they change nothing."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, Model

from ms_kungfu.callbacks import BroadcastCallback, KungFuElasticCallback, sync_net_parameters
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.errors import ResizeError


def make_model():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(3)
    net = nn.Dense(1, 1)
    return Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9)), net


def make_source(total=20):
    x = np.arange(total, dtype=np.float32)[:, None] / total
    return ms.dataset.NumpySlicesDataset((x, 2 * x), ["x", "y"], shuffle=False)


class Steps(Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        self.seen.append((params.cur_epoch_num, params.cur_step_num, params.batch_num))


def test_a_cluster_of_one_trains_as_without_it():
    weights = []
    for callbacks, data in (
        ([], make_source().batch(4)),
        ([BroadcastCallback(), KungFuElasticCallback()], ElasticDataset(make_source(), 4, shuffle=False)),
    ):
        model, net = make_model()
        steps = Steps()
        model.train(2, data, callbacks=[*callbacks, steps], dataset_sink_mode=False)
        assert steps.seen == [(1 + i // 5, 1 + i, 5) for i in range(10)]
        weights.append([p.asnumpy() for p in net.get_parameters()])
    np.testing.assert_array_equal(weights[0][0], weights[1][0])


def test_one_callback_serves_several_calls():
    model, _ = make_model()
    elastic, steps, data = KungFuElasticCallback(), Steps(), ElasticDataset(make_source(), 4)
    for _ in range(2):
        model.train(1, data, callbacks=[elastic, steps], dataset_sink_mode=False)
    assert [step for _, step, _ in steps.seen] == [1, 2, 3, 4, 5] * 2
    assert elastic.training.step == 10


def test_sink_mode_is_refused():
    model, _ = make_model()
    with pytest.raises(ValueError, match="dataset_sink_mode=False"):
        model.train(1, make_source().batch(4), callbacks=[KungFuElasticCallback("2:2")], dataset_sink_mode=True)


def test_a_wrong_schedule_is_refused_where_it_is_given():
    with pytest.raises(ValueError, match="'10:0'"):
        KungFuElasticCallback("10:0")


def test_growing_without_kungfu_run_is_refused():
    model, _ = make_model()
    with pytest.raises(ResizeError, match="2 were asked for"):
        model.train(1, make_source().batch(4), callbacks=[KungFuElasticCallback("2:2")], dataset_sink_mode=False)


def test_sync_net_parameters_takes_cells_and_parameters():
    _, net = make_model()
    before = net.weight.asnumpy().copy()
    sync_net_parameters(net)
    sync_net_parameters(net.trainable_params())
    np.testing.assert_array_equal(net.weight.asnumpy(), before)


@pytest.mark.parametrize("root", [1, -1, True, "0"])
def test_a_wrong_root_is_refused(root):
    with pytest.raises(ValueError, match="rank from 0 to 0"):
        BroadcastCallback(root)
