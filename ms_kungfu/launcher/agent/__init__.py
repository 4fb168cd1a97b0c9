"""The agent of each host: workers, shared memory, connections between hosts. It decides nothing about the job."""
