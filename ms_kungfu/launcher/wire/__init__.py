"""The messages between the processes of a job, and their encoding."""

PROTOCOL = 4  # incremented with each change that makes the messages unreadable for older processes; 1 had no types
