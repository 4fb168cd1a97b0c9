"""The specifics of GPUs and Ascend devices on the Python side."""
