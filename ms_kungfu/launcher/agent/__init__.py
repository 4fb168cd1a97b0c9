"""The agent of each host: workers, shared memory, connections between hosts. It makes no decisions about the job."""
