"""kungfu-run: start the workers of a job, provide their shared memory, and clean up when they have ended."""
