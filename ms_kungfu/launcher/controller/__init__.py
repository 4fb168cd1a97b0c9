"""The job's controller: it sends messages to each host, and owns no worker process and no file descriptor."""
