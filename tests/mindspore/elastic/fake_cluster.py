"""A cluster played in one process: each rank is a dataset of its own, asked in turn."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import mindspore.dataset as ds
import numpy as np

from ms_kungfu.dataset import ElasticDataset, batches, dealing, elastic, ledger, shares


class FakeRuntime:
    """The cluster as seen by the rank whose turn it is; also what the runtime knows of the last step."""

    def __init__(self):
        self.rank, self.size, self.version, self.gone = 0, 1, 0, False
        self.participants = None  # all
        self.weights = {}
        self.outcomes = {}

    def current_rank(self):
        return self.rank

    def current_cluster_size(self):
        return self.size

    def cluster_version(self):
        return self.version

    def detached(self):
        return self.gone

    def is_deferred(self):
        return False

    def current(self):
        """The member, in whose cluster no worker has died."""
        return SimpleNamespace(core=SimpleNamespace(sharded_members=lambda: list(range(self.size))))

    def uid(self):
        return self.version << 8 | self.rank

    def take_participants(self):
        return list(range(self.size)) if self.participants is None else self.participants

    def watch_reductions(self):
        return self

    def take_commits(self):
        return 1, []

    def begins(self):
        """As the step of the training that drives a dataset."""

    def participants_of(self, version):
        return self.outcomes.get(version)

    def set_weight(self, samples):
        self.weights[self.rank] = samples

    def resize(self, size):
        self.outcomes[self.version], self.participants = self.take_participants(), None
        self.size, self.version = size, self.version + 1


def play(monkeypatch):
    """The fixture `cluster`."""
    fake = FakeRuntime()
    monkeypatch.setattr(elastic, "runtime", fake)
    monkeypatch.setattr(batches, "runtime", fake)
    monkeypatch.setattr(batches.membership, "watch_reductions", fake.watch_reductions)
    for module in (shares, dealing):
        for name in ("runtime", "membership"):
            monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(ledger, "runtime", fake)
    return fake


class Samples:
    """Sample i is [i]."""

    def __init__(self, total):
        self.total = total

    def __len__(self):
        return self.total

    def __getitem__(self, i):
        return (np.array([i], dtype=np.float32),)


def generator(total):
    return ds.GeneratorDataset(Samples(total), ["x"], shuffle=True)


def by_function(indices):
    return ds.GeneratorDataset([(np.array([i], dtype=np.float32),) for i in indices], ["x"], shuffle=False)


def sample_numbers(columns):
    return columns[0].ravel().astype(int).tolist()


def train(cluster, source, resizes=(), deaths=(), epochs=2, numbers=sample_numbers, **options):
    """(samples that were trained in each epoch as a Counter, samples of the global batch at each step).

    `resizes` is {step: size}. `deaths` is {step: rank}: it dies in this step, which is committed without it; two steps
    later the cluster goes on without it under a new version.
    """
    resizes, deaths = dict(resizes), dict(deaths)

    def make():
        monkey, ElasticDataset._made = ElasticDataset._made, 0  # each rank is a program of its own
        data = ElasticDataset(source, **options)
        ElasticDataset._made = monkey
        data.driven = cluster
        return data, data.create_tuple_iterator(num_epochs=epochs, output_numpy=True)

    workers = {rank: make() for rank in range(cluster.size)}
    seen, steps, step = [collections.Counter()], [], 0
    while True:
        batches, step = {}, step + 1
        for cluster.rank, (data, iterator) in workers.items():
            batch = next(iterator, None)
            # a sample that is repeated because there are too few isn't the worker's own
            batches[cluster.rank] = None if batch is None else numbers(batch)[: cluster.weights[cluster.rank]]
            assert batch is None or data.weight == cluster.weights[cluster.rank]
        if None in batches.values():
            assert set(map(str, batches.values())) == {"None"}, "all ranks end an epoch at the same step"
            if len(seen) == epochs:
                return seen, steps
            seen.append(collections.Counter())
            step -= 1
            continue
        dead = deaths.get(step)
        participants = [rank for rank in range(cluster.size) if rank in workers and rank != dead]
        workers.pop(dead, None)
        batches.pop(dead, None)
        for cluster.rank, (data, _) in workers.items():
            data.commit(participants)
            assert cluster.weights[cluster.rank] == 1
        steps.append([i for rank in sorted(batches) for i in batches[rank]])
        seen[-1].update(steps[-1])
        if step - 2 in deaths or step in resizes:
            size = resizes.get(step, len(workers))
            old = [workers[rank] for rank in sorted(workers)]
            cluster.resize(size)
            workers = dict(enumerate(old[:size]))
            for cluster.rank in range(len(old), size):
                workers[cluster.rank] = make()
                workers[cluster.rank][0].restore(old[0][0].state())
        cluster.rank = 0
