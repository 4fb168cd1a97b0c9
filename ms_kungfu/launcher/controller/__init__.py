"""Decides for the job: it owns no process and no descriptor, and speaks to each host by messages."""
