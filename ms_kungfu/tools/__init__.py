"""Tools for training jobs. Each tool for users has a module in ms_kungfu with its command's name."""
