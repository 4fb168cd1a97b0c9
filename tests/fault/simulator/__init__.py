"""A job without processes, on a virtual clock: kungfu-run, its broker, a config server and workers in one thread.

What runs is the code of the package, from the launcher's `Job` to a worker's `ElasticTraining`; nothing of it is
replaced, and what it is given is simulated: the machine, a member's ports, the disk (`docs/recovery-tests.md`).
Processes and threads are greenlets, asyncio's loop is `clock.Loop`, messages take a random time, and the collectives
are `collectives.Core`. A worker may die wherever it waits, and it waits at each place that matters.

`hosts_world` has a job over several hosts: a launcher on each, with a loop of its own (`host`), connections between
them (`network`), and what goes over these between transports (`transports`).

One seed and one list of events give one course of things, every time.
"""
