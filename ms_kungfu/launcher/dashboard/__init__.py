"""The live page of a job (`kungfu-run -dashboard`): its HTTP server, and the files that the server sends."""
