"""Each host has an agent, which manages the host's workers, shared memory and connections to other hosts.

An agent makes no decisions about the job. It obeys the controller.
"""
