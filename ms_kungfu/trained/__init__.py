"""Find the Parameters that training changes, write to them, and check that they are equal on all workers."""
