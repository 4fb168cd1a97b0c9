"""``python -m benchmarks.churn``: measure the cost of training while workers are killed, for several systems.

Each system trains the same models on the same samples, and loses workers at the same times (:mod:`.schedule`). The
final weights show how often the training used each sample (:mod:`.samples`). docs/benchmarks/churn.md explains how to
run the benchmark.

- :mod:`.driver` executes a run of a system (:mod:`.systems`); the run's processes are children of :mod:`.shim`
- :mod:`.programs` contains the training program of each system; these share :mod:`.worker` and :mod:`.workloads`
- :mod:`.measure` converts a run to a row of a CSV file; :mod:`.table` and :mod:`.picture` show the rows
- :mod:`.peers` installs the other systems in a separate virtual environment

The programs of other systems run in that environment, which has no ms_kungfu. So :mod:`.worker`, :mod:`.workloads`,
:mod:`.samples` and :mod:`.shim` import only NumPy and the standard library.
"""
