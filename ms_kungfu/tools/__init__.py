"""Programs around a training. Those that users start have a module of their command's name in ms_kungfu."""
