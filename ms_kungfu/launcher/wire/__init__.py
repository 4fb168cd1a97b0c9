"""The messages between the processes of a job, and their encoding."""

PROTOCOL = 4  # incremented with each change that makes messages unreadable for older processes; protocol 1 had no types
