"""Programs around a training. Those for users have a module of their command's name in ms_kungfu."""
