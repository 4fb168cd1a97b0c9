"""kungfu-run: starts the workers of a job, hands them their shared memory, and cleans up after them."""
