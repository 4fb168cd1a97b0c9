"""Run programs written for MindSpore's msrun unchanged (``kungfu-run --msrun``).

Such a program calls ``mindspore.communication`` once, at its start, to get the number of ranks and its own rank. The
program sets up its training accordingly. So this package returns the ranks of a *virtual world* of V ranks
(``--msrun-size``), which never changes, even if the workers change. MindSpore itself stays in stand-alone mode.

- `hook` waits until the program imports MindSpore. `answers` then replaces some of MindSpore's functions.
- `world`: the virtual world. `communication`, `context`: the replaced functions. `reducers`: sums over the virtual
  world.
- `pipelines`, `training`: partition a dataset with V shards among the present workers, under ``Model.train``,
  ``Model.fit`` and ``Model.eval``. `loops`: the same for a program's own training loop.

For users: docs/from-msrun.md.
"""
