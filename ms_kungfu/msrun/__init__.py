"""Run programs written for MindSpore's msrun unchanged (``kungfu-run --msrun``).

When such a program starts, it calls ``mindspore.communication`` once to get the number of ranks and its own rank, and
sets up its training accordingly. Therefore, this package assigns the program a rank in a *virtual world* of V ranks
(``--msrun-size``), which never changes, even if the workers change. MindSpore itself stays in stand-alone mode.

- `hook` waits until the program imports MindSpore. `answers` then replaces some of MindSpore's functions.
- `world` defines the virtual world.
- `communication` and `context` contain the functions that replace MindSpore's. `reducers` contains sums over the
  virtual world.
- `pipelines` and `training` partition a dataset with V shards among the current workers, for ``Model.train``,
  ``Model.fit`` and ``Model.eval``. `loops` does the same for a program's own training loop.

The documentation for users is docs/from-msrun.md.
"""
