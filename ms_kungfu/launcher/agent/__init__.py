"""The agent of each host manages workers, shared memory and connections between hosts.

It makes no decisions about the job.
"""
