"""What needs one process only: loading, the older module's name, arguments."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import pytest

from ms_kungfu.ops import KungFuAllReduce, KungFuBroadcast, ReduceOp, _plugin
from ms_kungfu.optimizers import KungFuGradReducer


def test_a_plugin_for_another_mindspore_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(_plugin, "is_of_a_wheel", lambda: False)
    for built in ("2.9.0", "2.10.0"):
        (tmp_path / built).mkdir()
    assert _plugin.folder_for("2.9.0", tmp_path) == tmp_path / "2.9.0"
    for other in ("2.9.1", "2.11.0", "2.1"):
        sentence = rf"built for MindSpore 2\.9\.0, 2\.10\.0, but MindSpore {other} is running; .*==2\.10\.0.*install"
        with pytest.raises(ImportError, match=sentence):
            _plugin.folder_for(other, tmp_path)


def test_a_plugin_that_lies_in_anothers_folder_is_refused():
    with pytest.raises(ImportError, match=rf"built for MindSpore 2\.7\.0, but MindSpore {ms.__version__} is running"):
        _plugin.check_version("2.7.0", ms.__version__)


def test_build_without_mindspore_is_reported_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(_plugin, "reinstall", lambda: "run /src/install-kungfu.sh")
    monkeypatch.setattr(_plugin, "is_of_a_wheel", lambda: False)
    with pytest.raises(ImportError, match=r"built without MindSpore.*; run /src/install-kungfu\.sh$"):
        _plugin.folder_for(ms.__version__, tmp_path)


def test_error_in_an_installed_wheel_suggests_no_build(tmp_path, monkeypatch):
    """A user without a checkout can't build anything anew."""
    monkeypatch.setattr(_plugin, "reinstall", lambda: "`pip install ms_kungfu`")
    monkeypatch.setattr(_plugin, "is_of_a_wheel", lambda: True)
    with pytest.raises(
        ImportError, match="kernels of ms_kungfu are missing: the installation is damaged; `pip install "
    ):
        _plugin.folder_for(ms.__version__, tmp_path)
    with pytest.raises(ImportError, match=r"==2\.7\.0\"`, or install a wheel of ms_kungfu for 2\.9\.0$"):
        _plugin.check_version("2.7.0", "2.9.0")
    monkeypatch.setitem(_plugin._FILES, "GPU", "libkungfu_ms_nowhere.so")
    with pytest.raises(ImportError, match="is missing: the installation is damaged, or .*; `pip install ms_kungfu`$"):
        _plugin._load("GPU")


def test_a_mindspore_without_kernels_is_refused_at_import(tmp_path):
    """By the first part of the package that needs MindSpore, in one sentence."""
    program = (
        "import mindspore; mindspore.__version__ = '2.11.0'\n"
        "import ms_kungfu as kf; kf.__version__, kf.errors\n"
        "import sys; sys.stdout.write('so far\\n'); sys.stdout.flush()\n"
        "kf.optimizers\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (1, "so far\n")
    said = done.stderr.splitlines()[-1]
    assert said.startswith("ImportError: the kernels of ms_kungfu were built for MindSpore ")
    assert "but MindSpore 2.11.0 is running" in said


def test_another_device_is_refused():
    with pytest.raises(ValueError, match='must be one of CPU, GPU, Ascend, not "TPU"'):
        _plugin._load("TPU")


def test_a_plugin_that_was_not_built_is_named_before_anything_is_opened(monkeypatch):
    monkeypatch.setitem(_plugin._FILES, "GPU", "libkungfu_ms_nowhere.so")
    monkeypatch.setattr(_plugin, "is_of_a_wheel", lambda: False)
    with pytest.raises(ImportError, match=r'libkungfu_ms_nowhere\.so, .* for device_target "GPU", is missing.*CUDA'):
        _plugin._load("GPU")


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match='must be one of sum, mean, min, max, prod, not "average"'):
        KungFuAllReduce("average")
    with pytest.raises(TypeError, match="op must be one of"):
        KungFuAllReduce(3)
    with pytest.raises(TypeError, match="name must be a non-empty string"):
        KungFuAllReduce(name="")
    with pytest.raises(ValueError, match="at least 0, not -1"):
        KungFuBroadcast(-1)
    with pytest.raises(TypeError, match="root must be a rank"):
        KungFuBroadcast("0")
    with pytest.raises(TypeError, match=r"True \(average\) or False \(sum\)"):
        KungFuGradReducer(mean=2)


def test_reduce_ops_are_named_as_in_mindspore():
    from mindspore.ops import ReduceOp as Theirs

    assert [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD] == [
        Theirs.SUM,
        Theirs.MIN,
        Theirs.MAX,
        Theirs.PROD,
    ]
    if hasattr(Theirs, "AVG"):  # since MindSpore 2.10
        assert KungFuAllReduce(Theirs.AVG).op == ReduceOp.MEAN


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], check=True, timeout=60, text=True, capture_output=True).stdout


def run_python_file(code):
    """MindSpore's compiler reads the source of what it compiles."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(code)
        done = subprocess.run([sys.executable, path], timeout=200, text=True, capture_output=True, cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]


def test_the_older_module_costs_nothing_until_it_is_imported():
    assert run_python("import sys, ms_kungfu; print('mindspore' in sys.modules)") == "False\n"


SAME = """
import ms_kungfu
import mindspore.ops.operations.kungfu_comm_ops as old
from mindspore.ops.operations import kungfu_comm_ops
from ms_kungfu import callbacks, ops, optimizers
assert kungfu_comm_ops is old
for name in ops.__all__:
    assert getattr(old, name) is getattr(ops, name), name
for name in ms_kungfu._RUNTIME:
    assert getattr(old, name) is getattr(ms_kungfu, name), name
assert old.sync_net_parameters is callbacks.sync_net_parameters
assert old.KungFuMomentum is optimizers.KungFuMomentum
assert not hasattr(old, "nothing")
"""


def test_older_module_is_the_same_classes_and_loads_only_when_asked():
    loaded = "import sys; print([name for name in ('ms_kungfu', 'mindspore') if name in sys.modules])"
    assert run_python(loaded) == "[]\n"
    program = (
        "import importlib.util as u; print(u.find_spec('mindspore.ops.operations.kungfu_comm_op'))\n"
        "from mindspore.ops.operations.kungfu_comm_ops import KungFuResize; print(KungFuResize.__module__)\n"
    )
    assert run_python(program + SAME) == "None\nms_kungfu.ops.resize\n"


def test_names_of_kungfus_mindspore_are_ours_or_refused_by_a_sentence():
    code = """
import sys, warnings
warnings.simplefilter("error")
import mindspore as ms
assert not any(name.split(".")[0] == "ms_kungfu" for name in sys.modules), "who asks for no such name imports nothing"
from mindspore._c_expression import kungfu_current_rank, kungfu_init
net = ms.nn.Dense(1, 1)
try:
    ms.nn.KungFuMomentum(net.trainable_params(), 0.1, 0.9)
except FutureWarning as warning:
    assert "mindspore.nn.KungFuMomentum is ms_kungfu.optimizers.KungFuMomentum" in str(warning)
    assert "gradients_mean=False to sum" in str(warning)
warnings.simplefilter("ignore")
from mindspore.nn import KungFuMomentum, KungFuAdam
from mindspore.nn.optim import KungFuSGD
import mindspore.nn.optim.kungfu as optimizers, mindspore.train.callback._kungfu as callbacks
import mindspore.ops.operations.kungfu_comm_ops as kfops
import ms_kungfu as kf
assert KungFuMomentum is optimizers.KungFuMomentum is kf.optimizers.KungFuMomentum
assert (KungFuSGD, KungFuAdam) == (kf.optimizers.KungFuSGD, kf.optimizers.KungFuAdam)
assert callbacks.KungFuElasticCallback is kf.callbacks.KungFuElasticCallback
assert (kungfu_init, kungfu_current_rank) == (kf.init, kf.current_rank)
refused = {
    "from mindspore._c_expression import kungfu_nccl_init": "ms_kungfu.KungFuContext(device='GPU')",
    "from mindspore.ops.operations.kungfu_comm_ops import KungFuSubsetAllReduce": "ms_kungfu.ops.KungFuAllReduce",
    "kfops.KungFuLogTensor": "ms_kungfu.monitoring.Monitor",
    "callbacks.KungFuSummaryCallback": "ms_kungfu.monitoring.Monitor",
}
for text, sentence in refused.items():
    try:
        exec(text)
    except ImportError as error:
        assert sentence in str(error), error
    else:
        raise AssertionError(text)
for module in (ms.nn, ms.nn.optim, ms._c_expression, optimizers, callbacks):
    assert not hasattr(module, "KungFuNothing") and not hasattr(module, "nothing")
assert not hasattr(callbacks, "KungFuMomentum") and not hasattr(ms._c_expression, "KungFuMomentum")
assert type(ms.nn.__spec__.loader).__module__.startswith("_frozen_importlib"), "MindSpore's own loader"
"""
    run_python(code)


def test_an_optimizer_follows_parameters_that_are_set_anew():
    """In PyNative mode MindSpore's compiled optimizer would go on with the old memory."""
    code = """
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn
from ms_kungfu.ops import KungFuAllReduce
from ms_kungfu.optimizers import KungFuMomentum, SynchronousSGDOptimizer

class Own(nn.Momentum):
    def __init__(self, *args):
        super(Own, self).__init__(*args)
        self.all_reduce = KungFuAllReduce()
        self.map_ = ms.ops.composite.Map()
    def construct(self, gradients):
        return super(Own, self).construct(self.map_(self.all_reduce, gradients))

ms.set_context(mode=ms.PYNATIVE_MODE)
for make in (Own, KungFuMomentum, lambda *args: SynchronousSGDOptimizer(nn.Momentum(*args))):
    params = [Parameter(Tensor(np.zeros(shape, np.float32)), name=f"p{len(shape)}") for shape in ((3,), ())]
    optimizer = make(params, 1.0, 0.5)
    gradients = tuple(Tensor(np.ones(p.shape, np.float32)) for p in params)
    for _ in range(2):
        optimizer(gradients)
        for param in optimizer.get_parameters():
            param.set_data(Tensor(param.asnumpy() + (10 if any(param is p for p in params) else 0)))
    optimizer(gradients)
    # Momentum is carried on: 1, 1.5, 1.75.
    assert [p.asnumpy().ravel()[0] for p in params] == [20 - 4.25] * 2, params
"""
    run_python_file(code)


@pytest.mark.parametrize("order", ["environment", "before", "after", "unpatched"])
def test_compile_cache_in_a_worker_is_off_and_logged_once(order, tmp_path, monkeypatch, caplog):
    from ms_kungfu.ops import _compile_cache

    stock = ms.context._context()
    monkeypatch.setenv("MS_COMPILER_CACHE_PATH", str(tmp_path))
    for api in ("mindspore.graph.api", "mindspore.common.api"):  # where MindSpore keeps the path of the program's file,
        if hasattr(sys.modules.get(api), "entry_script_path"):  # which the cache reads and pytest-xdist's workers lack
            monkeypatch.setattr(sys.modules[api], "entry_script_path", None)
    monkeypatch.setattr(_compile_cache._logging, "set_up", lambda rank: None)
    monkeypatch.setattr(_compile_cache.membership, "rank", lambda: 0)
    try:
        if order == "environment":
            monkeypatch.setenv("MS_COMPILER_CACHE_ENABLE", "1")
        elif order != "after":
            ms.set_context(enable_compile_cache=True)
        if order != "unpatched":
            _compile_cache.keep_off()
            _compile_cache.keep_off()  # a second import changes nothing
        if order == "after":
            ms.set_context(enable_compile_cache=True)
            ms.set_context(enable_compile_cache=True)

        @ms.jit
        def double(x):
            return x + x

        double(ms.Tensor([1.0, 2.0]))
        written = [path.name for path in tmp_path.rglob("*.mindir")]
        enabled = ms.get_context("enable_compile_cache")
    finally:
        vars(stock).pop("set_param", None)
        stock.set_param(_compile_cache.ms_ctx_param.enable_compile_cache, -1)
        stock.enable_compile_cache = None
    if order == "unpatched":
        assert written  # what this test takes for the cache is one
        return
    assert (enabled, written) == (False, [])
    setting = "MS_COMPILER_CACHE_ENABLE=1" if order == "environment" else "set_context(enable_compile_cache=True)"
    (line,) = [record.message for record in caplog.records if record.name.startswith("ms_kungfu")]
    assert line.startswith(f'compile cache: off in workers setting="{setting}" reason=')
