"""What is particular to GPUs and Ascend devices on the Python side."""
