"""Code that is specific to GPUs and Ascend devices."""
