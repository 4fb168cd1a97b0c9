"""What of a training two runs are compared by."""

import mindspore as ms
from mindspore import nn

from ms_kungfu.elastic import ElasticTraining
from ms_kungfu.elastic.fingerprints import fingerprint


def test_fingerprint_covers_all_trained_state_that_must_be_equal():
    net = nn.SequentialCell(nn.Dense(3, 4), nn.BatchNorm1d(4))
    net.insert_param_to_cell("own", ms.Parameter(ms.Tensor([1.0]), name="own", requires_grad=False))
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    all_of_it = set(fingerprint(ElasticTraining(net, optimizer).training_state))
    kinds = ("weight", "moments", "gamma", "moving_mean", "moving_variance", "learning_rate", "own")
    assert [kind for kind in kinds if not any(kind in name for name in all_of_it)] == []
    chosen = ElasticTraining(net, optimizer, averaged=[net.own]).training_state
    assert all_of_it - set(fingerprint(chosen)) == {"own"}
