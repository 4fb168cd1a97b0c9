"""What else is in a step of shards: each works, with the bits of one worker, or is refused by a sentence."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

from ms_kungfu import comm, membership
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.callbacks.sharded import ShardedTraining
from ms_kungfu.dataset import ElasticDataset, audit
from ms_kungfu.elastic import ElasticTraining, ShardedStep, shard_loop, sharded_step
from ms_kungfu.errors import DivergenceError, KungFuError
from ms_kungfu.ops import KungFuAllReduce, ReduceOp, wait_for_queue
from ms_kungfu.optimizers import KungFuGradReducer, KungFuMomentum
from tests.conftest import long

PROGRAM = "sharded_features.py"


def history(reports):
    """The state after each step, having checked that all workers agree on it and on what the step gave."""
    seen = {}
    for step, rows in reports.by_step("after").items():
        (seen[step],) = {row["parameters"] for row in rows}
    for step, rows in reports.by_step("step").items():
        given = {tuple(sorted((k, v) for k, v in row.items() if k not in ("rank", "size", "plain"))) for row in rows}
        assert len(given) == 1, f"step {step}"
    return seen


@pytest.fixture(scope="module")
def alone():
    """What one worker makes of it, by kind."""
    return {}


@pytest.fixture
def of_one_worker(run_elastic, alone):
    def run(kind):
        if kind not in alone:
            alone[kind] = run_elastic(PROGRAM, "graph", kind, "2", "none", ledger=False)
            assert len(history(alone[kind])) == 6
        return alone[kind]

    return run


@pytest.mark.parametrize(
    ("mode", "kind", "np", "schedule", "deaths"),
    [
        ("graph", "scaled", 1, "2:2", ["5:0:1"]),  # the one that has joined goes on
        long("graph", "scaled", 2, "3:3", ["2:0:1", "5:1:1"]),
        long("pynative", "scaled", 2, "none", ["4:0:1"]),
        long("graph", "scaler", 2, "none", ["4:0:1"]),
        long("graph", "clip", 3, "4:2", ["2:1:1"]),
        long("graph", "gan", 2, "3:3", ["2:1:5"]),  # its second shard of the second network
        long("graph", "fit", 2, "2:3", ["5:0:1"]),
        long("graph", "mixed", 2, "3:3", ["2:0:1"]),
    ],
)
def test_every_history_has_the_bits_of_one_worker(run_elastic, of_one_worker, mode, kind, np, schedule, deaths):
    one = of_one_worker(kind)
    seen = run_elastic(PROGRAM, mode, kind, "2", schedule, *deaths, np=np)
    assert history(seen) == history(one)
    report = seen.audit()
    assert report.exact, audit.to_text(report)
    assert sum(epoch.given_back for epoch in report.epochs) > 0
    if kind in ("scaled", "scaler"):
        check_scales(one)
    if kind == "clip":
        assert all(row["plain"] for row in one.of("step"))
    if kind == "fit":
        check_evaluations(one, seen)


def check_scales(one):
    """Sample 7 overflows once an epoch: that step changes no weight and halves the scale."""
    weights = {step: rows[0]["weights"] for step, rows in one.by_step("after").items()}
    rows = {step: rows[0] for step, rows in one.by_step("step").items()}
    skipped = [step for step in range(2, 7) if weights[step] == weights[step - 1]]
    scales = [rows[step]["scale"] for step in range(1, 7)]
    assert len(skipped) >= 1
    assert len(set(weights.values())) == 6 - len(skipped)
    if "overflow" in rows[1]:
        assert [row["step"] for row in rows.values() if row["overflow"]][-len(skipped) :] == skipped
        for step in range(1, 6):
            assert scales[step] <= scales[step - 1] / 2 if rows[step]["overflow"] else scales[step] >= scales[step - 1]
    assert len(set(scales)) >= 2


def check_evaluations(one, seen):
    expected = {step: rows[0]["loss"] for step, rows in one.by_step("evaluated").items()}
    found = seen.by_step("evaluated")
    assert list(expected) == list(found) == [3, 6]
    for step, rows in found.items():
        assert len({row["loss"] for row in rows}) == 1
        assert rows[0]["loss"] == pytest.approx(expected[step], rel=1e-6)


@pytest.mark.long
def test_a_fixed_scale_that_is_a_power_of_two_changes_no_bit(run_elastic, of_one_worker):
    assert history(run_elastic(PROGRAM, "graph", "fixed", "2", "none", np=2)) == history(of_one_worker("plain"))


@pytest.mark.long
def test_a_checkpoint_goes_on_at_another_size_with_the_scale(run_elastic, of_one_worker, tmp_path):
    one, folder = history(of_one_worker("scaled")), f"checkpoints={tmp_path / 'checkpoints'}"
    before = history(run_elastic(PROGRAM, "graph", "scaled", "1", "none", folder, np=2, ledger=False))
    assert before == {step: one[step] for step in (1, 2, 3)}
    after = history(run_elastic(PROGRAM, "graph", "scaled", "2", "none", folder, np=3, ledger=False))
    assert after == {step: one[step] for step in (3, 4, 5, 6)}


# -- what is refused, on one worker -----------------------------------------------------------------------------------


def samples():
    return NumpySlicesDataset([1.0, 2.0, 3.0, 4.0], ["x"], shuffle=False)


@pytest.fixture
def one_step():
    """``run(forward_backward, update)`` makes one step of two shards in PyNative mode."""
    ms.set_context(mode=ms.PYNATIVE_MODE)

    def run(forward_backward, update=lambda gradients: None, **options):
        step = ShardedStep(forward_backward, update, **options)
        data = ElasticDataset(samples(), global_batch_size=4, shards=2, shuffle=False)
        loss = step(*next(data.create_tuple_iterator()))
        wait_for_queue()
        return loss

    yield run
    ms.set_context(mode=ms.GRAPH_MODE)


def mean(x):
    x = x.astype(ms.float32)
    return x.mean(), (x.sum(),)


def test_the_step_that_the_others_are_compared_with_works(one_step):
    seen = []
    assert one_step(mean, lambda gradients: seen.append(float(gradients[0]))) == 2.5
    assert one_step(mean, lambda gradients: seen.append(float(gradients[0])), gradients_mean=False) == 2.5
    assert seen == [5.0, 10.0]


@pytest.mark.parametrize("where", ["forward_backward", "update"])
def test_gradients_are_reduced_in_no_other_way(one_step, where):
    reduce = KungFuAllReduce(ReduceOp.SUM, "mine") if where == "forward_backward" else KungFuGradReducer()

    def reduced(gradients):
        return tuple(reduce(g) for g in gradients) if where == "forward_backward" else reduce(gradients)

    def forward_backward(x):
        loss, gradients = mean(x)
        return loss, reduced(gradients) if where == "forward_backward" else gradients

    with pytest.raises((RuntimeError, ValueError), match="can't run in a sharded step, because the workers compute"):
        one_step(forward_backward, reduced if where == "update" else lambda gradients: None)


def test_reducer_known_to_the_step_leaves_the_gradients_unchanged(one_step):
    seen, reducer = [], KungFuGradReducer()
    one_step(mean, lambda gradients: seen.append(float(reducer(gradients)[0])), trained=reducer)
    assert seen == [5.0]


def test_collectives_of_the_programs_own_are_refused_between_shards(one_step):
    def forward_backward(x):
        comm.all_reduce(x.asnumpy(), name="mine")
        return mean(x)

    with pytest.raises(ValueError, match='"mine" can\'t run in a sharded step'):
        one_step(forward_backward)


class Counting(nn.Cell):
    """Counts the updates in a Parameter that no optimizer has, before it looks at a gradient."""

    def __init__(self, effect):
        super().__init__()
        self.made = ms.Parameter(ms.Tensor(0, ms.float32), name="made", requires_grad=False)
        self.seen = ms.Parameter(ms.Tensor(0, ms.float32), name="seen", requires_grad=False)
        self.effect = effect

    def construct(self, gradients):
        ops.assign_add(self.made, ops.ones((), ms.float32))
        return ops.assign_add(self.seen, self.effect(gradients[0]))


class Reduced(nn.Cell):
    """An effect that others learn of."""

    def __init__(self):
        super().__init__()
        self.reduce = KungFuAllReduce(ReduceOp.SUM, name="of the update")

    def construct(self, gradient):
        return self.reduce(gradient)


class Printed(nn.Cell):
    """One in a branch, so that it is no node of the graph itself."""

    def construct(self, gradient):
        if gradient > 0:
            ops.print_("the gradient is", gradient)
        return gradient


class Drawn(nn.Cell):
    """Random numbers from the kernel's own state."""

    def construct(self, gradient):
        return gradient + 0 * ops.standard_normal(()).astype(ms.float32)


@pytest.fixture
def undoable(monkeypatch):
    """What the step says of each update that is to be undone where it doesn't count."""
    ms.set_context(mode=ms.GRAPH_MODE)
    core, said = membership.current().core, []
    follows = core.update_follows
    monkeypatch.setattr(core, "update_follows", lambda written: said.append(follows(written)))
    return said


X = np.arange(12, dtype=np.float32)


def three_steps(shards=4):
    data = ElasticDataset(NumpySlicesDataset([*X], ["x"]), global_batch_size=4, shards=shards, shuffle=False)
    return enumerate(data.create_tuple_iterator(), 1)


@pytest.mark.parametrize("effect", [nn.Identity, Reduced, Printed, Drawn])
def test_a_compiled_update_is_made_once_a_step(effect, undoable):
    """Its graph runs four times a step, and in the first one twice more for comparison."""
    update = Counting(effect())
    step = ShardedStep(mean, update)
    for number, columns in three_steps():
        step(*columns)
        assert update.made.asnumpy() == number
    assert number == 3
    assert update.seen.asnumpy() == X.sum() / 4
    # What does more than write to Parameters can't be taken back.
    assert len(undoable) == (3 * 4 + 2 if effect is nn.Identity else 0)


def test_an_update_that_asks_the_interpreter_is_made_once_a_step(undoable):
    """`float` and `asnumpy` in a compiled function are calls of Python, which may do anything."""
    made = ms.Parameter(ms.Tensor(0, ms.float32), name="made", requires_grad=False)

    def update(gradients):
        if float(gradients[0]) > -1:
            ops.assign_add(made, ops.ones((), ms.float32))

    step = ShardedStep(mean, update)
    for number, columns in three_steps():
        step(*columns)
        assert made.asnumpy() == number
    assert not undoable


def test_a_compiled_update_may_go_by_a_loss_scaler(undoable):
    net = nn.Dense(1, 1)
    optimizer = KungFuMomentum(net.trainable_params(), 0.01, 0.9)
    scaler = ms.amp.DynamicLossScaler(2.0**125, 2, 1000)  # too much in the last step

    def scaled(x):
        return scaler.scale(net(x.reshape(-1, 1)).mean())

    gradients = ms.value_and_grad(scaled, None, optimizer.parameters)

    def forward_backward(x):
        loss, found = gradients(x)
        return loss, scaler.unscale(found)

    def update(found):
        finite = ms.amp.all_finite(found)
        if finite:
            optimizer(ops.clip_by_global_norm(found, 1.0))
        scaler.adjust(finite)

    before = net.weight.asnumpy().copy()
    step = ShardedStep(forward_backward, update, trained=[net, optimizer])
    for _, columns in three_steps():
        step(*columns)
    assert scaler.scale_value.asnumpy() == 2.0**124
    assert net.weight.asnumpy() != before


def test_statistics_that_another_step_keeps_are_refused_by_name(undoable):
    """A discriminator's step that calls the generator in training mode."""
    generator = nn.BatchNorm1d(1).set_train()
    generator.update_parameters_name("generator.")

    def forward_backward(x):
        h = generator(x.reshape(-1, 1))
        return h.mean(), (h.sum(),)

    def update(gradients):
        return gradients[0]

    ShardedStep(forward_backward, update, trained=generator)
    for told, refused in ((None, True), (generator, False)):
        step = ShardedStep(forward_backward, update, trained=told)
        batches = three_steps()
        _, columns = next(batches)
        if refused:
            with pytest.raises(ValueError, match=r"changes 'generator\..*pass all networks that the step"):
                step(*columns)
        else:
            step(*columns)


@pytest.mark.parametrize(("shards", "runs"), [(1, 3 + 2), (4, 0)])
def test_updates_of_large_networks_are_not_made_once_a_shard(shards, runs, undoable, monkeypatch):
    monkeypatch.setattr(sharded_step, "_DEAR_BYTES", 7)
    update = Counting(nn.Identity())
    step = ShardedStep(mean, update)
    for _, columns in three_steps(shards):
        step(*columns)
    assert update.seen.asnumpy() == X.sum() / shards
    assert len(undoable) == runs


def test_parameters_may_be_set_between_steps(undoable):
    update = Counting(nn.Identity())
    step = ShardedStep(mean, update)
    for number, columns in three_steps():
        step(*columns)
        assert update.made.asnumpy() == 10 * (number - 1) + 1
        update.made.set_data(ms.Tensor(10.0 * number, ms.float32))  # in other memory
    assert len(undoable) == 3 * 4 + 2


def test_an_update_that_cannot_be_undone_ends_training(undoable, monkeypatch):
    step = ShardedStep(mean, Counting(nn.Identity()))
    steps = three_steps()
    step(*next(steps)[1])
    read = step.cell._written._read
    seen = []

    def moved():
        seen.append(read())
        return [address + 8 * (len(seen) > 1) for address in seen[-1]]

    monkeypatch.setattr(step.cell._written, "_read", moved)
    _, columns = next(steps)
    with pytest.raises(KungFuError, match="have moved"):
        step(*columns)
    with pytest.raises(ValueError, match="was not undone"):
        step(*columns)
    membership.current().core.undo_update()  # for the tests that follow


def test_a_second_sum_in_one_step_is_refused(one_step):
    steps = []

    def forward_backward(x):
        steps.append(x)
        return mean(x)

    def update(gradients):
        again.cell(steps[-1])

    again = ShardedStep(mean, lambda gradients: None)
    with pytest.raises((RuntimeError, KungFuError), match="a second time in one of its"):
        one_step(forward_backward, update)


class OwnCell(nn.TrainOneStepCell):
    """As programs have it that reduce, clip or skip by themselves."""

    def __init__(self, network, optimizer):
        super().__init__(network, optimizer)
        self.reducer = KungFuGradReducer(optimizer.parameters)


def test_a_training_cell_of_ones_own_is_refused_with_what_to_do():
    net = nn.WithLossCell(nn.Dense(1, 1), nn.MSELoss())
    optimizer = KungFuMomentum(net.trainable_params(), 0.1, 0.9)
    for cell, name in (
        (OwnCell(net, optimizer), "OwnCell"),
        (nn.TrainOneStepCell(net, optimizer, return_grad=True), r"TrainOneStepCell\(return_grad=True\)"),
        (nn.ForwardValueAndGrad(net, optimizer.parameters), "ForwardValueAndGrad"),
    ):
        with pytest.raises(ValueError, match=f"can't train a {name} with shards.*ShardedStep"):
            ShardedTraining(cell)


def test_a_sum_over_the_workers_is_refused_where_the_step_makes_a_mean():
    parameters = nn.Dense(1, 1).trainable_params()
    optimizer = KungFuMomentum(parameters, 0.1, 0.9, gradients_mean=False)
    with pytest.raises(ValueError, match="sums the gradients over the workers, .* also pass it to the ShardedStep"):
        ShardedStep(mean, optimizer)
    ShardedStep(mean, optimizer, gradients_mean=False)


def test_an_optimizer_that_was_left_to_shards_is_refused_without():
    net = nn.Dense(1, 1)
    optimizer = KungFuMomentum(net.trainable_params(), 0.1, 0.9)
    ElasticTraining(net, optimizer, dataset=ElasticDataset(samples(), 2)).begin()
    ShardedStep(mean, optimizer)
    with pytest.raises(ValueError, match="a ShardedStep has replaced .* or create a new optimizer"):
        ElasticTraining(net, optimizer, dataset=ElasticDataset(samples(), 2)).begin()
    with pytest.raises(
        ValueError,
        match="the training has no shards; pass the dataset with shards",
    ):
        ElasticTraining(net, optimizer).begin()
    ElasticTraining(net, optimizer, dataset=ElasticDataset(samples(), global_batch_size=2, shards=1)).begin()


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])  # a thread has its maker's way with denormals
def test_denormals_are_zeros_in_each_step(mode):
    """A graph's first run is MindSpore's pool's, whose threads flush them, and the later ones are the caller's; what
    PyNative mode queues is its queue's thread's or the pool's, by what was faster in the first launches."""
    ms.set_context(mode=mode)
    net = nn.Dense(1, 64)
    optimizer = KungFuMomentum(net.trainable_params(), 0.1, 0.9)

    def forward(x):
        return (net(x.astype(ms.float32).reshape((1, 1))) * 0).sum()

    try:
        data = ElasticDataset(NumpySlicesDataset(np.arange(40), shuffle=False), global_batch_size=1, shards=1)
        step = ShardedStep(ms.value_and_grad(forward, None, optimizer.parameters), optimizer, trained=net)
        held = []
        training = ElasticTraining(net, optimizer, dataset=data)
        for _ in training.epochs(1):
            for columns in data.create_tuple_iterator():
                optimizer.moments[0].copy_(ms.Tensor(np.full((64, 1), 1e-39, np.float32)))
                step(*columns)
                held.append(optimizer.moments[0].asnumpy().max())
                training.step_end()
        assert held == [0.0] * 40
        assert np.float32(1e-39) * np.float32(0.5) != 0, "the thread is as it was"
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture
def loop():
    """``run(trained, told)`` trains two steps of two shards in a loop of its own, whose ShardedStep is told of `told`.
    `between`: what the loop does between a batch's sum and the end of its step; `ends`: whether it ends steps."""
    ms.set_context(mode=ms.PYNATIVE_MODE)

    def run(trained, told=None, between=lambda data: None, ends=True, **options):
        data = ElasticDataset(samples(), global_batch_size=2, shards=2, shuffle=False, **options)
        training = ElasticTraining(*trained, dataset=data)
        step = ShardedStep(mean, lambda gradients: None, trained=told)
        for _ in training.epochs(1):
            for columns in data.create_tuple_iterator():
                step(*columns)
                between(data)
                if ends:
                    training.step_end()

    yield run
    ms.set_context(mode=ms.GRAPH_MODE)


def test_moving_statistics_unknown_to_the_step_are_refused_by_name(loop):
    net = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match=r"'mean' would differ between workers: .*trained=net"):
        loop([net])
    loop([net], net)


def test_an_optimizer_that_reduces_beside_the_steps_is_refused(loop):
    optimizer = KungFuMomentum(nn.Dense(1, 1).trainable_params(), 0.1, 0.9)
    with pytest.raises(ValueError, match="reduces gradients over the workers, next to a ShardedStep"):
        loop([optimizer])
    loop([optimizer], optimizer)


def test_gradients_are_not_accumulated_over_several_batches_of_shards(loop):
    with pytest.raises(KungFuError, match=r"call step_end\(\) after each"):
        loop([nn.Dense(1, 1)], ends=False)


def test_record_of_a_step_has_the_batch_as_it_was_partitioned(loop, tmp_path):
    batches = iter([4, 2])
    loop(
        [nn.Dense(1, 1)], between=lambda data: data.set_batch_size(global_batch_size=next(batches, 2)), ledger=tmp_path
    )
    report = audit.audit(*audit.read(tmp_path))
    assert report.exact, audit.to_text(report)


def test_tensors_of_a_shard_are_named_in_the_order_of_the_sum():
    parameters = [ms.Parameter(ms.Tensor([1.0], dtype), name) for name, dtype in (("a", ms.float32), ("b", ms.float16))]
    names = shard_loop.ShardLoop(parameters, True, lambda: ["Float32", "Float16", "Float32"])._names(3)
    assert names == ["the gradient of 'b'", "the gradient of 'a'", "the loss"]
    names = shard_loop.ShardLoop([], True, lambda: ["Float64", "Float64", "Float32"])._names(3)
    assert names == ["the loss", "gradient 0", "gradient 1"]


@pytest.mark.parametrize(
    ("loss_type", "type_"), [(ms.float32,) * 2, (ms.float16, ms.float32), (ms.float32, ms.float64)]
)
@pytest.mark.parametrize("differing", ["gradient 1", "the loss"])
def test_differing_gradient_is_distinguished_from_the_loss(one_step, caplog, loss_type, type_, differing):
    calls = []

    def forward_backward(x):
        calls.append(x)
        drawn = [float(len(calls)) if name == differing else 1.0 for name in ("gradient 0", "gradient 1", "the loss")]
        return ms.Tensor(drawn[2], loss_type), tuple(ms.Tensor([value], type_) for value in drawn[:2])

    if differing == "the loss":
        one_step(forward_backward)
        assert "computed one shard twice, and the loss differs" in caplog.text
    else:
        with pytest.raises(DivergenceError, match="computed one shard twice, and gradient 1 differs"):
            one_step(forward_backward)


def test_a_second_call_of_model_train_compiles_nothing():
    ms.set_context(mode=ms.GRAPH_MODE)
    net = nn.Dense(1, 1)
    model = Model(net, nn.MSELoss(), KungFuMomentum(net.trainable_params(), 0.01, 0.9))
    data = ElasticDataset(
        NumpySlicesDataset((np.ones((6, 1), np.float32),) * 2, ["x", "y"]), global_batch_size=4, shards=2
    )
    compiled = []
    for _ in range(3):
        model.train(1, data, callbacks=[KungFuElasticCallback()], dataset_sink_mode=False)
        compiled.append(model._train_network.kungfu_sharded.step.cell.graphs)
    assert compiled == [compiled[0]] * 3
    assert compiled[0] > 0


def test_the_callbacks_batch_is_given_to_a_dataset_once():
    net = nn.Dense(1, 1)
    model = Model(net, nn.MSELoss(), KungFuMomentum(net.trainable_params(), 0.0, 0.9))
    data = ElasticDataset(NumpySlicesDataset((np.ones((8, 1), np.float32),) * 2, ["x", "y"]), 1)
    callback = KungFuElasticCallback(global_batch_size=4)
    model.train(1, data, callbacks=[callback], dataset_sink_mode=False)
    assert data.global_batch_size == 4
    data.set_batch_size(global_batch_size=8)  # as a policy does
    model.train(1, data, callbacks=[callback], dataset_sink_mode=False)
    assert data.global_batch_size == 8


@pytest.mark.parametrize("target", ["GPU", "Ascend"])
def test_devices_without_shards_are_refused(monkeypatch, target):
    monkeypatch.setattr(ms, "get_context", {"device_target": target}.get)
    with pytest.raises(ValueError, match="on CPUs only; leave shards= out"):
        ShardedStep(mean, lambda gradients: None)
