"""Run programs for MindSpore's msrun unchanged (``kungfu-run --msrun``).

Such a program asks ``mindspore.communication`` once, at its start, how many ranks there are and which one it is, and
builds its training by the answers. So the answers are those of a *virtual world* of V ranks (``--msrun-size``), which
never changes, even if the workers do. MindSpore itself stays stand-alone.

- `hook` waits for the program to import MindSpore, and then has `answers` replace MindSpore's functions.
- `world`: the virtual world. `communication`, `context`: the answers. `reducers`: sums over the world.
- `pipelines`, `training`: a dataset that is sharded for V ranks, under ``Model.train``, ``Model.fit`` and
  ``Model.eval``, is partitioned among the present workers. `loops`: the same under a loop of the program's own.

For users: docs/from-msrun.md.
"""
