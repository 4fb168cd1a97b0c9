"""What the processes of a job say to each other: the messages, and how they become bytes."""

PROTOCOL = 4  # changes with each change of the messages that another version can't read: 1 had no types
