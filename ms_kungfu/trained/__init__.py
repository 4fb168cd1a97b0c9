"""What is trained: find it, write to it, and check that it is equal on all workers."""
