"""The training programs, one for each system. The argument is the name of a file with a :class:`..worker.Plan`."""
