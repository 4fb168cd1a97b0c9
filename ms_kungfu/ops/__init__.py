from ms_kungfu.ops.all_reduce import KungFuAllReduce
from ms_kungfu.ops.reduce_op import ReduceOp
