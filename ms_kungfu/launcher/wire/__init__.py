"""The messages between the processes of a job, and their encoding."""

PROTOCOL = 4  # changes with each change of the messages that another version can't read: 1 had no types
