"""``python -m benchmarks.churn``: what training costs while workers are killed, beside other systems.

Each system trains the same models on the same samples, and loses workers at the same times (:mod:`.schedule`). The
final weights say how often each sample was trained (:mod:`.samples`). docs/benchmarks/churn.md says how to run it.

- :mod:`.driver` carries out a run of a system (:mod:`.systems`), whose processes are below :mod:`.shim`
- :mod:`.programs` holds the training program of each system; they share :mod:`.worker` and :mod:`.workloads`
- :mod:`.measure` turns a run into a row of a CSV file; :mod:`.table` and :mod:`.picture` show these
- :mod:`.peers` installs the other systems in a virtual environment of their own

The programs of other systems run in that environment, which has no ms_kungfu. So :mod:`.worker`, :mod:`.workloads`,
:mod:`.samples` and :mod:`.shim` import nothing but NumPy and the standard library.
"""
