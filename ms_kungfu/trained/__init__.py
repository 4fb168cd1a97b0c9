"""What is trained: how it is found and written to, and whether it is equal on all workers."""
