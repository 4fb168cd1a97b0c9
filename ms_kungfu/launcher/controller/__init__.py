"""The job's controller. It sends messages to each host, but owns no worker process and no file descriptor."""
