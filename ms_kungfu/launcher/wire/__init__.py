"""What the processes of a job say to each other: the messages, and how they become bytes."""
