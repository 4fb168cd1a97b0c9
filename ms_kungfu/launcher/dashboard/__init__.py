"""The live page of a job: its HTTP server and its files (`kungfu-run -dashboard`)."""
