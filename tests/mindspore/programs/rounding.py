"""How far apart two trainings may end that compute the same sums in other orders: n workers and one, or two CPUs.

Rounding to nearest is off by at most u = 2**-p of the result (p bits of significand: 24 for float32, 11 for float16).
The order of a sum, and so its roundings, is free: how a batch is divided, how wide the CPU's vectors are.

 - A sum of n terms is off by at most n u sum|t| (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and, as
   roundings have random signs, by more than 4 sqrt(n) u sum|t| in one case of 3000 only (Higham and Mary, A new
   approach to probabilistic rounding error analysis, 2019). Terms of random signs cancel: sum|t| is about sqrt(n) times
   what sums of them come to, which is the size of the largest elements of the result. So two of them are no further
   apart than 8 n u times the largest element. A gradient's n are the terms along its path: the inputs of each layer and
   the batch.
 - An update is the learning rate times gradients; what it has moved a tensor is off by the same part of the distance.
 - A weight is rounded at each step, in either training.
 - What differs after a step changes the next gradient. That adds no more than once the same for each step as long as
   the training is stable: learning rate x largest eigenvalue of the Hessian below 2 (momentum m: below 2 + 2 m). Every
   program keeps far below it; beyond, errors grow as fast as the weights do. An update that divides by a norm of the
   gradient needs an epsilon of the gradients' size, or it makes a whole step of what is rounding only.
"""

from __future__ import annotations

import numpy as np

BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}


def relative(steps, terms, dtype="float32"):
    """The part of the distance gone that may differ."""
    return steps * 8 * terms * 2.0 ** -BITS[dtype]


def check(what, got, want, start, steps, terms, dtype="float32"):
    """That one tensor is `want`, having been `start` before `steps` steps; and that the check could fail."""
    moved = np.abs(want - start).max()
    tolerance = relative(steps, terms, dtype) * moved + 2 * steps * 2.0 ** -BITS[dtype] * np.abs(want).max()
    # What one of seven workers leaves out, or a step too many, has to show.
    assert 10 * tolerance < moved or dtype == "float16", f"{what}: moved {moved}, tolerance {tolerance}"
    off = np.abs(got.astype(np.float64) - want).max()
    assert off <= tolerance, f"{what}: off by {off}, {tolerance} are allowed: {got}, expected {want}"
