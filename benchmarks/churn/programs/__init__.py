"""The training programs, one of each system. Each gets the name of a file with its :class:`..worker.Plan`."""
