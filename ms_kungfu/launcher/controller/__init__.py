"""The job's controller. It sends messages to the hosts' agents, but owns no worker process and no file descriptor."""
