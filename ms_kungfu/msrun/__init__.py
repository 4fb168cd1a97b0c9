"""``kungfu-run --msrun``: programs that were written for MindSpore's msrun, with no line changed.

Such a program asks ``mindspore.communication`` once, at its start, how many ranks there are and which one it is, and
builds what it trains by the answers. So they are those of a *virtual world* of V ranks (``--msrun-size``), which never
change, whatever becomes of the workers. Nothing of MindSpore's is started: to itself it is stand-alone.

- `hook` waits for the program to import MindSpore, and then has `answers` put our functions where MindSpore's are.
- `world`: the virtual world. `communication`, `context`: what is answered. `reducers`: sums over the world.
- `pipelines`, `training`: a dataset that is sharded for V ranks, under ``Model.train``, ``Model.fit`` and
  ``Model.eval``, is dealt to the workers that there are. `loops`: the same under a loop of the program's own.

For users: docs/from-msrun.md.
"""
