"""The job's controller: it owns no process and no descriptor, and sends messages to each host."""
