"""Convert sequential-only datasets (TFRecord, CSV, text, iterators) to datasets of numbered samples."""

from __future__ import annotations

import copy
import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import mindspore.dataset as ds
import numpy as np

from ms_kungfu._packing import decode, encode
from ms_kungfu.dataset import pipelines

_log = logging.getLogger(__name__)
_FORMAT = 1
_NEWS_S = 10.0


class _Rows:
    """Read samples by number from a folder. Several processes, including forked ones, may read at the same time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rows"
        self._ends = np.load(folder / "ends.npy")
        self._file: tuple[int, int] | None = None  # (process ID, descriptor that this process opened)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> tuple[Any, ...]:
        if self._file is None or self._file[0] != os.getpid():
            self._file = os.getpid(), os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        begin, end = int(self._ends[number]), int(self._ends[number + 1])
        return tuple(decode(os.pread(self._file[1], end - begin, begin)))

    def __deepcopy__(self, memo: Any) -> _Rows:
        return self  # MindSpore copies a pipeline for each iterator


def indexed(
    dataset: ds.Dataset, folder: str | os.PathLike[str], num_shards: int | None = None, shard_id: int | None = None
) -> ds.GeneratorDataset:
    """Copy a sequential-only dataset into a folder, so that each sample has a number.

    An `ElasticDataset` accepts the result. The first call reads the whole dataset once and logs its
    progress. Later calls reuse the copy, even in other processes and jobs. If several processes on
    a host call `indexed` at the same time, one process makes the copy and the others wait. The copy
    has the size of the decoded samples.

    If the dataset reads files, the copy is made again if the name, size or modification time of a
    file has changed. If the dataset reads an iterator, the copy is never made again automatically:
    remove the folder if the iterator's samples change.

    Args:
        dataset: a dataset of ``mindspore.dataset``, such as ``TFRecordDataset``, ``CSVDataset``,
            ``TextFileDataset``, or a ``GeneratorDataset`` whose source is a function. The dataset
            must have no shards and ``shuffle=False``. The result has the samples in the dataset's
            order.
        folder: the folder for the copy. Use one folder per dataset. The folder may be local to each
            host or on a shared disk.
        num_shards: number of shards of the result, for ``--msrun``. An `ElasticDataset` doesn't
            need this argument.
        shard_id: number of the shard that this process reads.

    Returns:
        A dataset with the same columns.

    Raises:
        TypeError: if `dataset` has an operation such as ``map`` (apply ``map`` to the result instead),
            or if it already numbers its samples.
        ValueError: if the dataset shuffles, has shards or has no samples.
        OSError: if the folder can't be written.
    """
    if not isinstance(dataset, ds.Dataset) or dataset.children:
        raise TypeError(
            f"indexed() takes a dataset such as TFRecordDataset(...), got {type(dataset).__name__}; apply "
            "map and batch to the result"
        )
    name, shards = type(dataset).__name__, getattr(dataset, "num_shards", None)
    if (shards or 1) > 1:
        raise ValueError(f"indexed: {name} has num_shards={shards}; give num_shards and shard_id to indexed() instead")
    if pipelines.is_numbered(dataset):
        raise TypeError(
            f"indexed: a {name} already numbers its samples; pass the dataset to ElasticDataset without indexed()"
        )
    if getattr(dataset, "shuffle_flag", 0) and not isinstance(dataset, ds.GeneratorDataset):
        raise ValueError(f"indexed: {name} shuffles, so its samples have no fixed numbers; pass shuffle=False to it")
    path, described = Path(folder), _described(dataset)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the operating system releases the lock if the process fails
        if not _has(path, described):
            _copy(dataset, path, described)
    columns = described["columns"]
    return ds.GeneratorDataset(_Rows(path), columns, shuffle=False, num_shards=num_shards, shard_id=shard_id)


def _described(dataset: Any) -> dict[str, Any]:
    """Return a description of the dataset. A copy is valid while the dataset's description stays the same."""
    files = [(str(file), os.stat(file)) for file in getattr(dataset, "dataset_files", ())]
    return {
        "format": _FORMAT,
        "dataset": type(dataset).__name__,
        "columns": list(dataset.get_col_names()),
        "files": [[name, found.st_size, found.st_mtime_ns] for name, found in files],
    }


def _has(path: Path, described: dict[str, Any]) -> bool:
    try:
        return bool(json.loads((path / "of.json").read_text()) == described)
    except (OSError, ValueError):
        return False


def _copy(dataset: ds.Dataset, path: Path, described: dict[str, Any]) -> None:
    """Copy all samples. The file ``of.json`` is written last, because its existence shows that the copy is complete."""
    (path / "of.json").unlink(missing_ok=True)
    (path / "rows").unlink(missing_ok=True)  # another process may still read the old file
    source: Any = copy.deepcopy(dataset)
    source.num_parallel_workers = 1  # so that several files are read in the same order on all machines
    began = told = time.monotonic()
    ends = [0]
    with open(path / "rows", "wb") as rows:
        for row in source.create_tuple_iterator(num_epochs=1, output_numpy=True):
            content = encode(row)
            rows.write(content)
            ends.append(ends[-1] + len(content))
            if time.monotonic() - told > _NEWS_S:
                told = time.monotonic()
                _log.info("indexing: path=%s samples=%d bytes=%d", path, len(ends) - 1, ends[-1])
    if len(ends) == 1:
        raise ValueError(f"indexed: {type(dataset).__name__} has no samples")
    np.save(path / "ends.npy", np.array(ends, np.int64))
    (path / "new").write_text(json.dumps(described))
    os.replace(path / "new", path / "of.json")
    seconds = time.monotonic() - began
    _log.info("indexed: path=%s samples=%d bytes=%d seconds=%.1f", path, len(ends) - 1, ends[-1], seconds)
