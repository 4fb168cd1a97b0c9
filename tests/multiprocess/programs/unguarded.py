"""A program without a main guard: it communicates, then starts a pool, whose processes run it from its start."""

import multiprocessing

import numpy as np

import ms_kungfu as kf

kf.comm.all_reduce(np.ones(1))
with multiprocessing.get_context("spawn").Pool(2) as pool:
    pool.map(abs, range(4))
