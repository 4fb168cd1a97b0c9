"""Datasets that are read in order alone (TFRecord, CSV, text, iterators), as datasets of numbered samples."""

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
    """The samples in a folder, by number. Processes may read at once, forked ones too."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rows"
        self._ends = np.load(folder / "ends.npy")
        self._file: tuple[int, int] | None = None  # of which process, and its descriptor

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
    """Copy a dataset that is read in order alone into a folder, to number its samples.

    An `ElasticDataset` takes the result. The first call reads the whole dataset once, and logs how far
    it is. Later calls find the copy, also in other processes and jobs. Of several processes of a host
    the first one copies, and the others wait. The copy is as large as the decoded samples.

    A copy of files is made again if a file's name, size or time of change differs. That of an iterator
    stays as it is: remove the folder if the iterator has other samples.

    Args:
        dataset: of ``mindspore.dataset``, such as ``TFRecordDataset``, ``CSVDataset``,
            ``TextFileDataset``, or a ``GeneratorDataset`` over a function. Without shards, and with
            ``shuffle=False``; the result has the samples in the dataset's order.
        folder: for the copy, of this dataset alone; one of each host or on a shared disk.
        num_shards: of the result, as ``--msrun`` takes it. An `ElasticDataset` needs none.
        shard_id: of the result.

    Returns:
        A dataset with the same columns.

    Raises:
        TypeError: if `dataset` is no dataset of its own, such as one with ``map``; map the result. Also
            if its samples have numbers already.
        ValueError: for a dataset that shuffles or has shards, or without samples.
        OSError: if the folder can't be written.
    """
    if not isinstance(dataset, ds.Dataset) or dataset.children:
        raise TypeError(
            f"indexed takes a dataset such as TFRecordDataset(...), got {type(dataset).__name__}; put map and batch "
            "behind the result"
        )
    name, shards = type(dataset).__name__, getattr(dataset, "num_shards", None)
    if (shards or 1) > 1:
        raise ValueError(f"indexed: {name} has num_shards={shards}; give num_shards and shard_id to indexed() instead")
    if pipelines.is_numbered(dataset):
        raise TypeError(f"indexed: the samples of a {name} have numbers; give it to the ElasticDataset as it is")
    if getattr(dataset, "shuffle_flag", 0) and not isinstance(dataset, ds.GeneratorDataset):
        raise ValueError(f"indexed: {name} shuffles, so its samples have no numbers; give it shuffle=False")
    path, described = Path(folder), _described(dataset)
    path.mkdir(parents=True, exist_ok=True)
    with open(path / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it if the process fails
        if not _has(path, described):
            _copy(dataset, path, described)
    columns = described["columns"]
    return ds.GeneratorDataset(_Rows(path), columns, shuffle=False, num_shards=num_shards, shard_id=shard_id)


def _described(dataset: Any) -> dict[str, Any]:
    """Return what a copy was made of."""
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
    """Copy all samples. ``of.json`` comes last: without it there is no copy."""
    (path / "of.json").unlink(missing_ok=True)
    (path / "rows").unlink(missing_ok=True)  # another process may still read the old one
    source: Any = copy.deepcopy(dataset)
    source.num_parallel_workers = 1  # the order of several files doesn't hang on the machine
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
