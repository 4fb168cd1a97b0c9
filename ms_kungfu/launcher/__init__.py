"""kungfu-run: start the workers of a job, give them their shared memory, and clean up after them."""
