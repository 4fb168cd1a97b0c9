"""The config server holds the wanted cluster of a job: a store, its HTTP server, and a client."""
