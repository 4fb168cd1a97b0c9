"""Tools for training jobs. For each tool that users run, the package ms_kungfu has a module with the tool's name."""
